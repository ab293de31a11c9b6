"""Several continuations of one prompt, ranked by the model's own log probability.

Look at the last lines: the prompt is computed once for all answers, and its blocks exist once. Only the block in which
the answers diverge is copied, once for each of the others. The score is the mean log probability of a token; the same
seed gives the same answers. Run: python examples/rank_answers.py [MODEL]
"""

import sys

from quire import LLM, SamplingParams

PROMPT = "import os\n\n\n" + "".join(
    f"def read_{name}(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
    for name in ("text", "notes", "config")
)
PROMPT += "def read_lines(path):\n    with open(path) as file:\n        return"
NUM_ANSWERS = 8


def main(model=None):
    """(score, answer) of each, best first; the tokens of the prompt; the engine's counts."""
    params = SamplingParams(n=NUM_ANSWERS, max_tokens=16, temperature=0.8, seed=1, logprobs=0, stop="\n")
    with LLM(model, kv_memory="64MiB") as llm:
        output = llm.generate(PROMPT, params)[0]
        stats = llm.stats()
    scored = []
    for answer in output.outputs:
        logprobs = [each[token] for each, token in zip(answer.logprobs or [], answer.token_ids, strict=True)]
        scored.append((sum(logprobs) / len(logprobs), answer.text))
    scored.sort(reverse=True)
    for score, text in scored:
        print(f"{score:>7.2f}  {text!r}")
    length, computed = len(output.prompt_token_ids), stats["num_computed_tokens"]
    print(
        f"{NUM_ANSWERS} answers to a prompt of {length} tokens, {stats['num_generated_tokens']} tokens generated"
    )
    print(f"{computed} tokens computed; {computed + (NUM_ANSWERS - 1) * length} without sharing")
    print(f"{stats['kv_peak_bytes'] >> 10} KiB of K and V at most, {stats['copied_blocks']} blocks copied")
    return scored, length, stats


if __name__ == "__main__":
    main(*sys.argv[1:2])
