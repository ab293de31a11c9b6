"""Tokens a second with drafts against without, in turns on one engine. JSON lines.

    python benchmarks/speculation.py [--quick] [--weights int4] [--dtype bfloat16] [--batches 1,8] [--tokens 128]
        [--repetitions 3] [--real FOLDER] [--only synthetic|text|drawn] [--generate] [--assistant FOLDER]

`synthetic`: random weights in the shape of Qwen3-0.6B (see engine.py), greedy. The proposer knows the true tokens and
spoils each draft with the probability 1 - acceptance. `text`: the included model, or `--real FOLDER`, with
speculation=ngram: a file to edit, questions over a document, free prose, and an adversarial text: tokens drawn at
random from six, so that three words recur all the time and tell nothing of the next. `--assistant`: drafts of that
model, speculation=model:FOLDER:4. `--generate`: the same texts by transformers' `generate`, batch 1 (it takes no other
with drafts): without drafts, with prompt_lookup_num_tokens=8, and with the assistant, in turns.

`drawn`: the included model at temperature 1. Its draft model is itself with weights rounded to 8, 4 and 3 bits in
groups of 32. Drafts are the likeliest tokens, then those drawn with the request's random numbers; both in every step.
    speed              the rate with drafts divided by that without, medians of the repetitions
    answer_speed       the mean time of an answer behind its first token, without drafts divided by that with them
    processor_speed    the same by the processor's time, which other programs on the machine change less
    accepted           of the drafts
    tokens_per_step    of a sequence
    is_equal           whether both gave the same tokens
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from engine import make_model, prompts_of
from machine import emit, emit_machine
from transformers import AutoModelForCausalLM, AutoTokenizer

import quire.weights
from quire import LLM, SamplingParams
from quire.engine.draft_model import ModelDrafter
from quire.sampling.proposers.proposer import register

ACCEPTANCES = (0.0, 0.5, 0.7, 0.9)
FILE = '''def load_config(path):
    """Read a configuration file and return a dictionary of its values."""
    values = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, value = line.split("=", 1)
            values[key.strip()] = value.strip()
    return values


def save_config(path, values):
    """Write a dictionary of values to a configuration file."""
    with open(path, "w") as file:
        for key, value in values.items():
            file.write(f"{key} = {value}\\n")
'''
TEXTS = {
    "edit a file": f"# The file:\n{FILE}\n# The same file, with one comment more:\n{FILE[:40]}",
    "questions over a document": f"{FILE}\n# Question: what does load_config do with a line?\n# Answer: ",
    "free prose": '"""The history of the library, its authors and',
}


class KnownTexts:
    """The true tokens, spoiled. texts: prompts with their answers."""

    texts: Sequence[Sequence[int]] = ()
    acceptance = 1.0
    vocab_size = 2

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def open(self, token_ids: Sequence[int], namespace: bytes | None) -> KnownText:
        return KnownText(self._rng, list(token_ids))

    def forget(self, namespace: bytes) -> None:
        pass


class KnownText:
    def __init__(self, rng: np.random.Generator, tokens: list[int]) -> None:
        self._rng, self._num_tokens = rng, len(tokens)
        self._text = next((t for t in KnownTexts.texts if list(t[: len(tokens)]) == tokens), ())

    def extend(self, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)

    def propose(self, num_tokens: int) -> Sequence[int]:
        true = np.array(self._text[self._num_tokens : self._num_tokens + num_tokens], np.int64)
        is_wrong = self._rng.random(len(true)) >= KnownTexts.acceptance
        return np.where(is_wrong, (true + 1) % KnownTexts.vocab_size, true).tolist()

    def close(self) -> None:
        pass


def run(
    llm: LLM, prompts: list[Any], params: SamplingParams, speculation: Any
) -> tuple[list[float], list[list[int]]]:
    """Seconds of the decode steps, the processor's seconds of all, the mean seconds of an answer behind its first
    token; and the tokens. speculation: the engine's, or None for the turn without."""
    llm.engine.scheduler.speculation = llm.engine._speculation = speculation
    before, processor = llm.engine._decode.seconds, time.process_time()
    outputs = llm.generate(prompts, params)
    processor = time.process_time() - processor
    times = [(o.timings.time_to_first_token_s or 0.0, o.timings.total_s or 0.0) for o in outputs]
    answer = statistics.mean(end - first for first, end in times)
    seconds = [llm.engine._decode.seconds - before, processor, answer]
    return seconds, [list(o.outputs[0].token_ids) for o in outputs]


def measure(llm: LLM, prompts: list[Any], params: SamplingParams, repetitions: int, **facts: Any) -> None:
    speculation: Any = llm.engine.scheduler.speculation
    assert speculation is not None
    _, expected = run(llm, prompts, params, None)  # the prompts are cached from then on
    KnownTexts.texts = [
        [*output.prompt_token_ids, *output.outputs[0].token_ids] for output in llm.generate(prompts, params)
    ]
    run(llm, prompts, params, speculation)  # measures the cost of rows
    before = dict(speculation.stats())
    seconds: dict[bool, list[list[float]]] = {False: [], True: []}
    is_equal, num_steps = True, 0
    for _ in range(repetitions):
        for with_drafts in (False, True):
            steps = llm.engine.scheduler.num_steps
            taken, tokens = run(llm, prompts, params, speculation if with_drafts else None)
            seconds[with_drafts].append(taken)
            is_equal &= tokens == expected
            num_steps += with_drafts * (llm.engine.scheduler.num_steps - steps)
    num_tokens = sum(map(len, expected))
    counts = {
        name: value - before[name] for name, value in speculation.stats().items() if isinstance(value, int)
    }
    without, drafted = (
        [statistics.median(each) for each in zip(*seconds[w], strict=True)] for w in (False, True)
    )
    speed, processor_speed, answer_speed = (round(a / b, 3) for a, b in zip(without, drafted, strict=True))
    emit(
        benchmark="speculation",
        **facts,
        batch=len(prompts),
        tokens_per_s_off=round(num_tokens / without[0], 1),
        tokens_per_s=round(num_tokens / drafted[0], 1),
        speed=speed,
        processor_speed=processor_speed,
        answer_speed=answer_speed,
        drafts=counts["num_draft_tokens"],
        accepted=round(counts["num_accepted_tokens"] / max(1, counts["num_draft_tokens"]), 3),
        tokens_per_step=round(num_tokens * repetitions / max(1, num_steps) / len(prompts), 2),
        is_equal=is_equal,
        cost_of_rows=cost_of_rows(speculation, len(prompts)),
    )


def measure_drawn(num_bits: int, num_tokens: int) -> None:
    prompts = [*TEXTS.values(), "def parse(text):", "for name in names:", "return self._"]
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=1, n=2, ignore_eos=True)
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        save_rounded(num_bits, folder)
        for drafts in ("likeliest", "drawn"):
            with ExitStack() as opened:
                llm = opened.enter_context(LLM(kv_memory="64MiB", speculation=f"model:{folder}:4"))
                speculation: Any = llm.engine._speculation
                speculation._divide = lambda limits, num_sequences, room: limits  # whatever they cost
                if drafts == "likeliest":
                    opened.enter_context(patch.object(ModelDrafter, "draw_like", lambda *_: None))
                answers.append(
                    [one.token_ids for output in llm.generate(prompts, params) for one in output.outputs]
                )
                counts = llm.stats()
            emit(
                "speculation",
                case="drawn",
                bits=num_bits,
                drafts=drafts,
                accepted=round(counts["num_accepted_tokens"] / counts["num_draft_tokens"], 3),
                tokens_per_step=round(1 + counts["num_accepted_tokens"] / counts["num_drafts"], 2),
                is_equal=answers[0] == answers[-1],
            )


def save_rounded(num_bits: int, folder: str) -> None:
    """The included model with each 32 weights of a linear layer rounded to `num_bits` bits."""
    source = Path(quire.weights.__file__).parent / "embedded"
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                groups = weight.view(-1, 32)
                scale = groups.abs().amax(1, keepdim=True) / (2 ** (num_bits - 1) - 1)
                groups.copy_(torch.round(groups / scale) * scale)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def cost_of_rows(speculation: Any, num_rows: int) -> list[float]:
    """The measured seconds of steps of 1, 2, 4 and 8 times as many rows, divided by the first."""
    seconds = speculation.costs.seconds(np.array([num_rows, 2 * num_rows, 4 * num_rows, 8 * num_rows]))
    return [] if seconds is None else [round(float(s / seconds[0]), 2) for s in seconds]


def measure_generate(
    folder: str, texts: dict[str, str], num_tokens: int, repetitions: int, assistant: str | None
) -> None:
    """Tokens a second of `generate` behind the first token, on the weights as transformers loads them, bfloat16."""
    model, tokenizer = load_for_generate(folder)
    ways: dict[str, dict[str, Any]] = {"off": {}, "prompt lookup": {"prompt_lookup_num_tokens": 8}}
    if assistant is not None:
        ways["assistant"] = {"assistant_model": load_for_generate(assistant)[0]}
    for name, text in texts.items():
        ids = tokenizer(text, return_tensors="pt").input_ids
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        tokens: dict[str, list[int]] = {}
        for turn in range(repetitions + 1):  # the first one warms up
            for way, options in ways.items():
                taken = []
                for count in (1, num_tokens):
                    began = time.perf_counter()
                    out = model.generate(
                        ids,
                        do_sample=False,
                        min_new_tokens=count,
                        max_new_tokens=count,
                        **(options if count > 1 else {}),
                    )
                    taken.append(time.perf_counter() - began)
                    tokens[way] = out[0, ids.shape[1] :].tolist()
                if turn:
                    seconds[way].append(taken[1] - taken[0])
        rates = {way: (num_tokens - 1) / statistics.median(taken) for way, taken in seconds.items()}
        emit(
            benchmark="generate",
            case=name,
            **{f"{way.replace(' ', '_')}_tokens_per_s": round(rate, 1) for way, rate in rates.items()},
            **{
                f"{way.replace(' ', '_')}_speed": round(rate / rates["off"], 3) for way, rate in rates.items()
            },
            is_equal={way: found == tokens["off"] for way, found in tokens.items()},
        )


def load_for_generate(path: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder or a GGUF file."""
    where, options = Path(path), {}
    if where.suffix == ".gguf":
        from transformers import GgufConfig

        dense = GgufConfig(dequantize=True)  # torch has no product with the codes
        where, options = where.parent, {"gguf_file": where.name, "quantization_config": dense}
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, **options).eval()
    return model, AutoTokenizer.from_pretrained(where, gguf_file=options.get("gguf_file"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and short answers: under 30 s")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--real", metavar="FOLDER", default=None, help="the model of the texts")
    parser.add_argument("--generate", action="store_true", help="also transformers' generate on the texts")
    parser.add_argument("--assistant", metavar="FOLDER", default=None, help="a draft model for the texts")
    parser.add_argument("--only", choices=["synthetic", "text", "drawn"], default=None)
    arguments = parser.parse_args()
    emit_machine()
    num_tokens = arguments.tokens or (48 if arguments.quick else 128)
    repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    if arguments.only in (None, "synthetic"):
        register("known", KnownTexts)
        model = make_model(quick=arguments.quick, dtype=arguments.dtype)
        KnownTexts.vocab_size = model.config.vocab_size
        options = {"kv_memory": "512MiB", "max_model_len": 512, "packed_weights": "off"}
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            source: Any = (model, None)
            if arguments.weights is not None:  # rounded while they load
                model.save_pretrained(folder)
                source, options["weights"] = folder, arguments.weights
            llm = opened.enter_context(LLM(source, speculation="known", **options))
            for batch in batches:
                for KnownTexts.acceptance in ACCEPTANCES:
                    prompts = prompts_of(batch, 64, batch)
                    facts = {
                        "case": "synthetic",
                        "acceptance": KnownTexts.acceptance,
                        "weights": arguments.weights,
                    }
                    measure(llm, prompts, greedy, repetitions, **facts)
    if arguments.only in (None, "text"):
        proposer = "ngram" if arguments.assistant is None else f"model:{arguments.assistant}:4"
        with LLM(arguments.real, speculation=proposer, kv_memory="512MiB", weights=arguments.weights) as llm:
            for batch in batches:
                for name, text in TEXTS.items():
                    prompts = [f"# {number}\n{text}" for number in range(batch)]
                    measure(llm, prompts, greedy, repetitions, case=name, weights=arguments.weights)
                drawn = SamplingParams(
                    max_tokens=num_tokens,
                    temperature=100.0,
                    seed=1,
                    allowed_token_ids=[300, 301, 302, 303, 304, 305],
                )
                prompts = [f"# {number}\n" for number in range(batch)]
                measure(llm, prompts, drawn, repetitions, case="adversarial", weights=arguments.weights)
    if arguments.only in (None, "drawn"):
        for num_bits in (4,) if arguments.quick else (8, 4, 3):
            measure_drawn(num_bits, num_tokens)
    if arguments.generate:
        if arguments.real is None:
            parser.error("expected --real FOLDER with --generate")
        texts = {name: f"# 0\n{text}" for name, text in TEXTS.items()}
        measure_generate(arguments.real, texts, num_tokens, repetitions, arguments.assistant)


if __name__ == "__main__":
    main()
