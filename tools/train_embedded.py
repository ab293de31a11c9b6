"""Train the small embedded language model from the Python standard library.

It builds a byte-level BPE tokenizer and a Qwen3-architecture model of about 5 M
parameters from the source of the running Python's standard library (`embedded_corpus.py`), in a
fixed budget of wall-clock time on a CPU, and writes both as an ordinary Hugging Face folder.
Held-out files are never seen by the tokenizer or the model. `--evaluate` measures the shipped
folder on those files.

It is not a general trainer. One model shape, one corpus, one process, no GPU.

The learning rate follows the training seconds used so far, so a run always ends annealed. The
same command resumes from the last checkpoint. While a file named PAUSE lies in the work folder
the run waits, and that time is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from embedded_corpus import (
    CONTEXT,
    IM_END,
    VOCABULARY,
    Windows,
    chat_documents,
    read_corpus,
    train_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "src" / "quire" / "weights" / "embedded"

SHORT, LONG = 512, CONTEXT  # window lengths of the two phases
LONG_SHARE = 0.15  # the last share of the time, spent on full-context windows
BATCH_TOKENS = 4096
MICRO_TOKENS = 2048
MUON_RATE, ADAM_RATE = 0.02, 0.004
WARM_UP, DECAY_FROM = 0.01, 0.35  # shares of the time budget
CHECKPOINT_SECONDS = 120


# ---------------------------------------------------------------- model and optimiser


def new_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=640,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(1 / math.sqrt(2 * config.num_hidden_layers))
    return model


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised (Newton-Schulz), for the weight matrices."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "weight_decay": 0.02})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        for p in group["params"]:
            by_shape.setdefault(p.shape, []).append(p)
        for shape, parameters in by_shape.items():
            steps = []
            for p in parameters:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                assert p.grad is not None
                buffer.lerp_(p.grad, 1 - group["momentum"])
                steps.append(p.grad.lerp(buffer, group["momentum"]))
            scale = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
            for p, step in zip(parameters, orthogonal(torch.stack(steps)), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step, alpha=scale)


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices, roughly, by five Newton-Schulz iterations."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.mT if g.shape[-2] > g.shape[-1] else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if g.shape[-2] > g.shape[-1] else x


def optimisers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    return [
        Muon(inner, lr=MUON_RATE),
        torch.optim.AdamW(outer, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(progress: float) -> float:
    """The learning rate's factor: warm-up, plateau, straight line to zero."""
    return min(1.0, progress / WARM_UP + 0.01, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


def loss_of(model: Qwen3ForCausalLM, window: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=window[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


# ---------------------------------------------------------------- measuring


@torch.inference_mode()
def bits_per_byte(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, text: str) -> float:
    """Bits the model needs per UTF-8 byte of `text`, read as one document in full contexts."""
    ids = [tokenizer.eos_token_id, *tokenizer.encode(text)]
    bits = 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        window = torch.tensor([ids[start : start + CONTEXT + 1]])
        logits = model(input_ids=window[:, :-1]).logits[0].float()
        bits += float(F.cross_entropy(logits, window[0, 1:], reduction="sum")) / math.log(2)
    return bits / len(text.encode())


def evaluate(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    bits = sum(bits_per_byte(model, tokenizer, text) * len(text.encode()) for text in texts)
    return bits / sum(len(text.encode()) for text in texts)


def print_samples(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "Write the function `add`. Return the sum of a and b."}]
    chat_prompt = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    for prompt in ("def fibonacci(n):", "class Stack:", "import os\n", chat_prompt):
        for temperature in (0.0, 0.7):
            torch.manual_seed(1)
            sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
            inputs = tokenizer(prompt, return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=120, **sampling)[0]
            print(f"----- temperature {temperature}\n{tokenizer.decode(output)}", flush=True)


def evaluate_shipped() -> None:
    _, held_out = read_corpus()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    size, bits = 0, 0.0
    for name, text in held_out.items():
        per_byte = bits_per_byte(model, tokenizer, text)
        print(f"{per_byte:.3f} bits per byte  {name}", flush=True)
        size += len(text.encode())
        bits += per_byte * len(text.encode())
    print(f"held out: {len(held_out)} files, {size} bytes, {bits / size:.4f} bits per byte")
    print_samples(model, tokenizer)


# ---------------------------------------------------------------- training


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the Hugging Face folder, the weights as bfloat16."""
    shipped = Qwen3ForCausalLM(model.config)
    shipped.load_state_dict(model.state_dict())
    shipped.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(IM_END)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,  # greedy answers of so small a model run in circles
        temperature=0.7,
        top_p=0.95,
        max_new_tokens=96,
    )
    shipped.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def train(work: Path, minutes: float) -> None:
    work.mkdir(parents=True, exist_ok=True)
    training, held_out = read_corpus()
    chats = chat_documents(training)
    if not (work / "tokenizer.json").exists():
        train_tokenizer(list(training.values())).save_pretrained(work)
    tokenizer = AutoTokenizer.from_pretrained(work)
    ids: list[int] = []
    for encoding in tokenizer(list(training.values()) + chats)["input_ids"]:
        ids += [tokenizer.eos_token_id, *encoding]
    stream = torch.tensor(ids)
    windows = {length: Windows(stream, length) for length in (SHORT, LONG)}
    sample = [text[:4000] for text in list(held_out.values())[::3]]

    model = new_model()
    optims = optimisers(model)
    state = {"elapsed": 0.0, "step": 0, "tokens": 0, "drawn": {SHORT: 0, LONG: 0}}
    if (work / "checkpoint.pt").exists():
        saved = torch.load(work / "checkpoint.pt")
        state = saved["state"]
        model.load_state_dict(saved["model"])
        for optim, optim_state in zip(optims, saved["optims"], strict=True):
            optim.load_state_dict(optim_state)
    size = sum(len(t.encode()) for t in training.values())
    print(
        f"{len(training)} training files, {size} bytes; {len(chats)} chats; {len(stream)} tokens; "
        f"{sum(p.numel() for p in model.parameters())} parameters; from step {state['step']}",
        flush=True,
    )

    compiled_loss = torch.compile(loss_of, dynamic=False)
    for length, window in windows.items():  # compile outside the time budget
        compiled_loss(model, window.take(0, MICRO_TOKENS // length)).backward()
    model.zero_grad()

    budget, last_saved = minutes * 60, state["elapsed"]
    while state["elapsed"] < budget:
        while (work / "PAUSE").exists():
            time.sleep(1)
        began = time.monotonic()
        progress = state["elapsed"] / budget
        length = LONG if progress > 1 - LONG_SHARE else SHORT
        rows = BATCH_TOKENS // length
        batch = windows[length].take(state["drawn"][length], rows)
        total = 0.0
        for micro in batch.split(MICRO_TOKENS // length):
            loss = compiled_loss(model, micro) * (len(micro) / rows)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim, peak in zip(optims, (MUON_RATE, ADAM_RATE), strict=True):
            optim.param_groups[0]["lr"] = peak * rate(progress)
            optim.step()
            optim.zero_grad()
        state["drawn"][length] += rows
        state["step"] += 1
        state["tokens"] += BATCH_TOKENS
        state["elapsed"] += time.monotonic() - began
        if state["step"] % 10 == 0:
            counts = f"step {state['step']} tokens {state['tokens']} seconds {state['elapsed']:.0f}"
            print(f"{counts} loss {total:.3f}", flush=True)
        if state["elapsed"] - last_saved > CHECKPOINT_SECONDS or state["elapsed"] >= budget:
            last_saved = state["elapsed"]
            saved = {"state": state, "model": model.state_dict(), "optims": [o.state_dict() for o in optims]}
            torch.save(saved, work / "checkpoint.tmp")
            os.replace(work / "checkpoint.tmp", work / "checkpoint.pt")
            print(f"sample: {evaluate(model, tokenizer, sample):.4f} bits per byte", flush=True)

    export(model.eval(), tokenizer, SHIPPED)
    result = {
        "bits_per_byte": evaluate(model, tokenizer, list(held_out.values())),
        "minutes": state["elapsed"] / 60,
        "tokens": state["tokens"],
        "steps": state["step"],
    }
    print(json.dumps(result), flush=True)
    print_samples(model, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--evaluate", action="store_true", help="measure the shipped folder")
    parser.add_argument("--minutes", type=float, default=80, help="training time (default 80)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embedded")
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.evaluate:
        evaluate_shipped()
    else:
        train(args.work, args.minutes)


if __name__ == "__main__":
    main()
