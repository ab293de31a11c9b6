"""Your own `model.generate()` with Quire's cache and kernels: one more argument, then one call.

Look at the texts: the first three ways give the same one. Look at the seconds: `accelerate` runs Quire's kernels. The
fork continues the same prompt in another direction: it computes only the tokens that are new, and shares the memory of
the others. Before transformers 5.24 the argument is `past_key_values=cache`. Run: python examples/drop_in.py [MODEL]
"""

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.hf import QuireCache, accelerate
from quire.weights.load import EMBEDDED

PROMPT = (
    "".join(f"def value_{i}(self):\n    return self._value[{i}]\n\n\n" for i in range(40))
    + "def size(self):\n"
)
NUM_NEW = 32


def main(name=str(EMBEDDED)):
    """The new tokens of each way, then those of the fork; and the bytes of the cache before the fork and after."""
    torch.set_num_threads(1)  # on a busy machine two threads would wait for each other
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]

    def generate(title, ids, cache=None):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        started = time.perf_counter()
        out = model.generate(**inputs, cache=cache, max_new_tokens=NUM_NEW, do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        print(f"{title:<26} {time.perf_counter() - started:5.2f} s  {tokenizer.decode(new)[:56]!r}")
        return new

    print(f"a prompt of {prompt.shape[1]} tokens, {NUM_NEW} new ones, float32")
    results = [generate("DynamicCache", prompt)]
    results.append(generate("QuireCache", prompt, QuireCache(model.config, kv_memory="256MiB")))
    accelerate(model)
    cache = QuireCache(model.config, kv_memory="256MiB")
    results.append(generate("QuireCache and accelerate", prompt, cache))

    num_bytes = cache.used_bytes
    fork = cache.fork()
    fork.crop(prompt.shape[1] - fork.get_seq_length())  # forgets the tokens after the prompt
    more = tokenizer('    """Raises', return_tensors="pt")["input_ids"]
    results.append(generate("a fork with another end", torch.cat([prompt, more], 1), fork))
    print(f"keys and values: {num_bytes / 2**20:.1f} MiB, with the fork {cache.used_bytes / 2**20:.1f} MiB")
    return results, num_bytes, cache.used_bytes


if __name__ == "__main__":
    main(*sys.argv[1:2])
