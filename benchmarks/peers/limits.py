"""The limit of the machine for each case, measured in the same run.

    decode    the fastest product measured for that number of rows over all weights, and the KV that a step reads
              at the read bandwidth
    prefill   all its products, the layers' and attention's two (of a causal mask, half), at the rate of the fastest
              product of 2 048 rows
    codes     a decode step of quantized weights reads its bytes and its KV at the read bandwidth, for any rows
    hybrids   of a decode row alone: its weights, KV and states over the read bandwidth, each counted once
    the rest  the sum of the prefills and decode steps it cannot do without: a shared prefix computed once and read
              once a step; of a cache that is too small, always full

`python limits.py SHAPE ROWS` (JSON both; SHAPE null: no products) measures, in its own process, and prints one
JSON line; `limit_of` is arithmetic. Product: Quire's packed one, oneDNN's packed one if it has the dtype, and
torch's, whichever is fastest, as in `benchmarks/linear.py`.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cases import Case
from shape import Dense, Hybrid, Shape

__all__ = ["Limits", "bytes_limit_of", "limit_of", "measure_limits", "rows_of"]

MANY_ROWS = 2048
REPETITIONS = 5


@dataclass(frozen=True)
class Limits:
    """The measurements: bytes a second, and per number of rows the seconds of one decoder layer and of the vocabulary
    projection."""

    bytes_per_s: float
    layer_s: dict[int, float]
    vocabulary_s: dict[int, float]


def rows_of(cases: list[Case], shape: Dense) -> list[int]:
    """The numbers of rows that the limits of these cases need."""
    cases = [case for case in cases if not case.turn]  # one row is projected, and no decode step counted
    few = {1} | {_at_once(case, shape) for case in cases} | {case.batch - 1 for case in cases if case.lead}
    return [*sorted(few), MANY_ROWS]


def _at_once(case: Case, shape: Shape) -> int:
    """Requests that decode together: as many as the cache can hold at their mean length."""
    if not case.tight:
        return case.batch
    return max(1, min(case.batch, int(_cache_tokens(shape) / _mean_length(case))))


def _cache_tokens(shape: Shape) -> int:
    return shape.tight_kv_bytes // shape.kv_bytes_per_token


def _mean_length(case: Case) -> float:
    return case.prompt + case.new / 2


def bytes_limit_of(case: Case, shape: Hybrid, num_parameters: int, limits: Limits) -> float | None:
    """Tokens/s of a decode row of a hybrid, whose products are not measured; None for other rows."""
    if case.figure != "rate":
        return None
    sequence = _mean_length(case) * shape.kv_bytes_per_token + 4 * shape.state_numbers
    step_bytes = num_parameters * shape.item_bytes + case.batch * sequence
    return case.batch * limits.bytes_per_s / step_bytes


def limit_of(case: Case, shape: Dense, limits: Limits, bits: tuple[float, float] | None = None) -> float:
    """The best figure of the case that the machine allows, in the case's unit.

    bits: of a weight of the layers and of the projection to the vocabulary, if they are quantized.
    """

    def step(rows: int, kv_tokens: float) -> float:
        kv = kv_tokens * shape.kv_bytes_per_token / limits.bytes_per_s
        if bits is not None:
            layers = shape.layers * sum(a * b for a, b in shape.linears) * bits[0] / 8
            return (layers + shape.vocab_size * shape.hidden * bits[1] / 8) / limits.bytes_per_s + kv
        return shape.layers * limits.layer_s[rows] + limits.vocabulary_s[rows] + kv

    def prefill(new: int, before: int = 0) -> float:
        """One prompt's `new` tokens, the first behind `before` known ones."""
        weights = sum(outputs * inputs for outputs, inputs in shape.linears)
        rate = 2 * MANY_ROWS * weights / limits.layer_s[MANY_ROWS]
        pairs = new * (before + new / 2)
        flops = shape.layers * (2 * new * weights + 4 * pairs * shape.heads * shape.head_dim)
        return flops / rate

    length, own = _mean_length(case), case.prompt - case.shared
    if case.figure == "prefill":
        return case.batch * case.prompt / (case.batch * prefill(case.prompt) + limits.vocabulary_s[1])
    if case.figure == "rate":
        return case.batch / step(case.batch, case.batch * length)
    if case.figure == "turn":
        return prefill(case.turn + 1, case.prompt + case.new - 1) + limits.vocabulary_s[1]
    if case.tight:
        steps = case.batch * (case.new - 1) / min(case.batch, _cache_tokens(shape) / length)
        return case.batch * prefill(case.prompt) + steps * step(_at_once(case, shape), _cache_tokens(shape))
    behind = case.batch - 1 if case.lead else case.batch
    total = prefill(case.shared) + case.batch * prefill(own, case.shared)
    total += (case.new - 1) * step(behind, case.shared + behind * (length - case.shared))
    if case.lead:
        total += (case.new - 1) * step(1, length)
    return total


def measure_limits(cases: list[Case], shape: Shape, threads: int) -> Limits:
    """Measures in its own process; only the bandwidth if the shape is not dense."""
    measured, rows = None, []
    if isinstance(shape, Dense):
        measured, rows = dataclasses.asdict(shape), rows_of(cases, shape)
    command = [sys.executable, __file__, json.dumps(measured), json.dumps(rows)]
    done = subprocess.run([*command, str(threads)], stdout=subprocess.PIPE, check=True)
    answer = json.loads(done.stdout)
    return Limits(
        answer["bytes_per_s"],
        {int(rows): seconds for rows, seconds in answer["layer_s"].items()},
        {int(rows): seconds for rows, seconds in answer["vocabulary_s"].items()},
    )


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import linear
    import torch

    from quire import _native  # pyright: ignore[reportAttributeAccessIssue]

    fields, all_rows, threads = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    _native.set_num_threads(threads)
    bytes_per_s = _native.read_bandwidth(1 << 28, REPETITIONS)
    if fields is None:
        print(json.dumps({"bytes_per_s": bytes_per_s, "layer_s": {}, "vocabulary_s": {}}))
        return
    shape = Dense(**fields)
    dtype = getattr(torch, shape.dtype)
    vocabulary = [(shape.vocab_size, shape.hidden)]
    weights = shape.layers * sum(a * b for a, b in shape.linears) + shape.vocab_size * shape.hidden
    linear.COLD_BYTES = min(linear.COLD_BYTES, weights * dtype.itemsize)  # no colder than the model's own
    fastest: dict[str, dict[int, float]] = {"layer_s": {}, "vocabulary_s": {}}
    for name, shapes in (("layer_s", shape.linears), ("vocabulary_s", vocabulary)):
        copies = linear.make_copies(shapes, dtype)
        for rows in all_rows:
            if name == "vocabulary_s" and rows == MANY_ROWS:
                continue  # of a prompt only the last row is projected
            inputs = [torch.randn(rows, width).to(dtype) for _, width in shapes]
            fastest[name][rows] = min(linear.measure(copies, inputs, REPETITIONS).values())
    print(json.dumps({"bytes_per_s": bytes_per_s, **fastest}))


if __name__ == "__main__":
    main()
