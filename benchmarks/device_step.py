"""Host time of a decode step on a device whose kernels do nothing, by part. JSON lines.

    python benchmarks/device_step.py [--quick] [--sequences 256] [--layers 28] [--vocab 1024]
        [--context 1024] [--profile FILE]

A card computes while the host prepares the next step, so the host's own time bounds the tokens per second. Here the
device "silent" has its own memory (`is_host` is false, as on a card); once the model is proved, its attention, its
writes and its products return tensors of the right shape and compute nothing. The model has the layers of Qwen3-0.6B
and random weights of tiny width, so that torch's remaining operators (norms, rotary embeddings, residuals) cost about
their call.

A row has the median microseconds of a step and of its parts, in processor time of the engine's thread: schedule (batch
and blocks), plan (tables, tensors), model (copies to and from the device, and the forward), sampling, update (tokens,
commits), outputs. `device_calls` are those of attention, writes and products in a step. Cases: one sequence and many,
with transformers' forward in Python, as a step without a graph; the same with captured graphs (`decode_graphs`), whose
numbers are copied as for a card and whose replay does nothing. With graphs a step of 256 sequences is to take at most
700 us: 150, and 2 for each sequence. The last row is the step of `engine.py --without-model`.

`--profile FILE` runs the last case under cProfile and writes the functions by their own time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import engine as engine_benchmark
import numpy as np
import torch
from machine import emit, emit_machine
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from quire import SamplingParams
from quire.attention import AttentionOptions
from quire.backends import extension
from quire.config import EngineConfig
from quire.devices import Device, PackedWeight, register
from quire.devices.cuda.decode_graphs import DecodeGraphs
from quire.devices.cuda.torch_device import TorchDevice
from quire.devices.device import unregister
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.engine.open_model import open_model
from quire.engine.open_storage import open_storage
from quire.engine.runner import Runner
from quire.memory import KVView
from quire.scheduler.request_validator import ServedModel
from quire.step import AttentionBatch, ForwardStep, StepCache

# The part of each of the engine's laps.
_LAPS: dict[str, str] = {
    "schedule": "schedule", "plan": "plan", "forward": "model", "sampling": "sampling", "update": "update",
    "detokenize": "outputs",
}  # fmt: skip
PARTS = tuple(_LAPS.values())
_BYTES_PER_TOKEN = 2 * 2 * 16 * 4  # of a layer of `make_model`


class _SilentWeight:
    """A weight whose product is zeros of the right shape while the device is silent."""

    def __init__(self, device: SilentDevice, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self._device, self._weight = device, weight.clone()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._device.is_silent:
            return self._device.zeros((*x.shape[:-1], self.num_outputs), self.dtype)
        return F.linear(x, self._weight, bias)

    def unpack(self) -> torch.Tensor:
        return self._weight.clone()

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weight)


class _SilentGraphs:
    """Graphs whose replay computes nothing."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        return compute(), lambda: None


class SilentDevice(TorchDevice):
    """The device of torch on CPU tensors until `is_silent`; then it computes nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.name = "silent"
        self.is_silent = False
        self.num_calls = 0
        self.graphs: _SilentGraphs | None = None
        self._zeros: dict[tuple[Any, ...], torch.Tensor] = {}

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros, one for all calls with the shape."""
        self.num_calls += 1
        known = self._zeros.get((shape, dtype))
        if known is None:
            known = self._zeros[shape, dtype] = torch.zeros(shape, dtype=dtype)
        return known

    def compute(
        self, step: ForwardStep, forward: Callable[[ForwardStep], torch.Tensor], cache: StepCache
    ) -> torch.Tensor:
        if self.graphs is None:
            return super().compute(step, forward, cache)
        captured = cache.compiled
        if captured is None or captured.generation != cache.generation:
            captured = cache.compiled = DecodeGraphs(self.torch_device, self.graphs, cache.generation)
        logits = captured.run(step, forward)
        return super().compute(step, forward, cache) if logits is None else logits

    def write(self, view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if self.is_silent:
            self.num_calls += 1
        else:
            super().write(view, k, v, slot_mapping)

    def run(
        self,
        view: KVView,
        query: torch.Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.is_silent:
            return self.zeros((*query.shape[:2], view.v_head_dim), query.dtype)
        return super().run(view, query, batch, options, out=out)

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return _SilentWeight(self, weight)


class _Laps:
    """The times of a step's parts, as the engine's profile; nanoseconds."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._step: dict[str, int] = {}
        self._last = 0

    def begin(self) -> None:
        self._step = dict.fromkeys(PARTS, 0)
        self._last = time.thread_time_ns()

    def lap(self, name: str) -> None:
        now = time.thread_time_ns()
        self._step[_LAPS[name]] += now - self._last
        self._last = now

    def end(self, step: Any) -> None:
        if step is not None:
            self.steps.append(self._step)


@contextmanager
def registered(device: SilentDevice) -> Iterator[None]:
    register(device.name, lambda: cast(Device, device))
    try:
        yield
    finally:
        unregister(device.name)


def make_model(num_layers: int, vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def measure(
    num_sequences: int,
    num_layers: int,
    vocab_size: int,
    context: int,
    num_steps: int,
    *,
    is_graph: bool,
    profile: cProfile.Profile | None,
) -> dict[str, float]:
    """Median microseconds of a decode step and of its parts; the device's calls of a step."""
    device, laps = SilentDevice(), _Laps()
    max_model_len = context + num_steps + 32
    config = EngineConfig(
        (make_model(num_layers, vocab_size), None),
        backend=device.name,
        max_num_seqs=num_sequences,
        max_model_len=max_model_len,
        kv_memory=num_sequences * max_model_len * num_layers * _BYTES_PER_TOKEN * 5 // 4,
        num_threads=1,
    )
    with registered(device), ExitStack() as resources:
        if (native := extension(None)) is not None:
            native.set_num_threads(1)
        model = open_model(config, resources)
        opened = open_storage(config, model.spec, model.max_model_len)
        resources.callback(opened.storage.close)
        runner = Runner(model.prepared, opened.storage)
        runner._profile = laps  # pyright: ignore[reportAttributeAccessIssue]  # without the records of operators
        engine = Engine(
            EngineParts(runner, opened.cache, profile=laps, native=extension(config.device_name)),  # pyright: ignore[reportArgumentType]
            ServedModel(vocab_size, max_model_len),
            limits=StepLimits(max_num_seqs=num_sequences, max_batch_tokens=1 << 16),
        )
        params = SamplingParams(max_tokens=num_steps + 16, temperature=0.0, ignore_eos=True)
        prompts = np.random.default_rng(0).integers(0, vocab_size, (num_sequences, context))
        for prompt in prompts.tolist():
            engine.submit(prompt, params)
        device.is_silent = True
        device.graphs = _SilentGraphs() if is_graph else None
        while len(engine.scheduler.running) < num_sequences or engine.scheduler.waiting:
            engine.step()
        for _ in range(4):
            engine.step()
        laps.steps.clear()
        device.num_calls = 0
        with profile or nullcontext():
            for _ in range(num_steps):
                engine.step()
        assert len(engine.scheduler.running) == num_sequences, "expected every sequence to run to the end"
        engine.abort_all()
    found = {part: statistics.median(step[part] for step in laps.steps) / 1000 for part in PARTS}
    found["step"] = statistics.median(sum(step.values()) for step in laps.steps) / 1000
    return found | {"calls": device.num_calls / num_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 layers, 20 steps")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument(
        "--context", type=int, default=None, help="tokens of a sequence before the first step"
    )
    parser.add_argument("--profile", metavar="FILE", default=None)
    arguments = parser.parse_args()
    num_layers = arguments.layers or (4 if arguments.quick else 28)
    num_steps = 20 if arguments.quick else 200
    context = arguments.context or (64 if arguments.quick else 1024)
    emit_machine()
    torch.set_num_threads(1)  # a card's operators take no thread of the host
    profile = None if arguments.profile is None else cProfile.Profile()
    many = arguments.sequences
    for num_sequences, is_graph in ((1, False), (many, False), (1, True), (many, True)):
        found = measure(
            num_sequences,
            num_layers,
            arguments.vocab,
            context,
            num_steps,
            is_graph=is_graph,
            profile=profile if is_graph and num_sequences == many else None,
        )
        emit(
            "device_step",
            case="decode step, " + ("captured graphs" if is_graph else "transformers' forward"),
            num_sequences=num_sequences,
            num_layers=num_layers,
            vocab_size=arguments.vocab,
            context=context,
            step_us=round(found["step"], 1),
            us_per_sequence=round(found["step"] / num_sequences, 2),
            **{f"{part}_us": round(found[part], 1) for part in PARTS},
            device_calls=round(found["calls"]),
        )
    if profile is not None and arguments.profile is not None:
        with open(str(arguments.profile), "w", encoding="utf-8") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(60)
    engine_benchmark.emit_step(None, 1 if arguments.quick else 3)


if __name__ == "__main__":
    main()
