"""A row's bits depend only on its sequence, in both back ends; slots that a step does not name are unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from support.recurrence_case import KINDS, SLOTS, make_case

from quire.backends import native_module
from quire.devices import device_of
from quire.recurrence import recurrence_step

_native = native_module()
BACKENDS = ["python", *(["native"] if hasattr(_native, "RecurrenceStep") else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_kind = pytest.mark.parametrize("kind", KINDS)
each_backend = pytest.mark.parametrize("name", BACKENDS)


@pytest.fixture(autouse=True)
def two_native_threads() -> Iterator[None]:
    before = 1 if _native is None else _native.num_threads()
    if _native is not None:
        _native.set_num_threads(2)
    yield
    if _native is not None:
        _native.set_num_threads(before)


@each_backend
@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_cut_anywhere_gives_the_same_bits(kind: str, name: str, seed: int) -> None:
    num_rows = [11, 11, 37][seed]
    case, kernels = make_case(kind, num_rows, DTYPES[seed], seed), device_of(name).recurrence
    whole = case.state.clone()
    want = case.run(kernels, whole, recurrence_step([0, num_rows], [4]))
    assert want.isfinite().all()
    for cuts in ([0, 1, num_rows], [0, 5, 6, num_rows], [*range(num_rows), num_rows]):
        state = case.state.clone()
        parts = [
            case.run(kernels, state, recurrence_step([0, stop - start], [4]), slice(start, stop))
            for start, stop in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), want), cuts
        assert torch.equal(state, whole), cuts


@each_backend
@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_company_and_order_change_no_bit_and_other_slots_stay(kind: str, name: str, seed: int) -> None:
    case, kernels = make_case(kind, 14, DTYPES[seed], 10 + seed), device_of(name).recurrence
    sequences = {5: [0, 1, 2], 0: [3], 7: list(range(4, 13)), 2: [13]}  # slot: rows
    alone, want = case.state.clone(), {}
    for slot, rows in sequences.items():
        want[slot] = case.run(kernels, alone, recurrence_step([0, len(rows)], [slot]), rows)
    for order in ([5, 0, 7, 2], [2, 7, 5, 0], [7, 2]):
        state = case.state.clone()
        untouched = [slot for slot in range(SLOTS) if slot not in order]
        state[untouched] = torch.nan
        rows = [row for slot in order for row in sequences[slot]]
        starts = [0]
        for slot in order:
            starts.append(starts[-1] + len(sequences[slot]))
        got = case.run(kernels, state, recurrence_step(starts, order), rows)
        assert torch.equal(got, torch.cat([want[slot] for slot in order])), order
        assert torch.equal(state[order], alone[order])
        assert state[untouched].isnan().all()


@each_backend
@each_kind
def test_a_checkpoint_is_the_state_after_its_row(kind: str, name: str) -> None:
    case, kernels = make_case(kind, 8, torch.float32, 20), device_of(name).recurrence
    starts, slots = [0, 6, 8], [3, 0]
    checkpoints = [(2, 7), (7, 5), (5, 1), (2, 8)]  # in any order, two at one row, at the last rows too
    state = case.state.clone()
    state[[7, 5, 1, 8]] = torch.nan
    got = case.run(kernels, state, recurrence_step(starts, slots, checkpoints))
    plain = case.state.clone()
    assert torch.equal(got, case.run(kernels, plain, recurrence_step(starts, slots)))
    assert torch.equal(state[slots], plain[slots])
    assert torch.equal(state[[5, 1]], plain[[0, 3]])
    part = case.state.clone()
    case.run(kernels, part, recurrence_step([0, 3], [3]), slice(0, 3))
    assert torch.equal(state[7], part[3])
    assert torch.equal(state[8], part[3])
    assert torch.equal(state[[2, 4, 6]], case.state[[2, 4, 6]])


@each_backend
@each_kind
def test_strided_inputs_and_out_are_the_same_bits(kind: str, name: str) -> None:
    case, kernels = make_case(kind, 6, torch.bfloat16, 30), device_of(name).recurrence
    step = recurrence_step([0, 4, 6], [1, 6])
    want_state = case.state.clone()
    want = case.run(kernels, want_state, step)
    for key, tensor in case.rows.items():  # as parts of one wide projection are
        case.rows[key] = torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]
        assert not case.rows[key].is_contiguous() or tensor.shape[0] == 1
    spaced = torch.full((2 * SLOTS, *case.state.shape[1:]), torch.nan)
    state = spaced[::2]
    state.copy_(case.state)
    out = torch.empty_like(want)
    case.out = out
    assert case.run(kernels, state, step) is out
    assert torch.equal(out, want)
    assert torch.equal(state, want_state)
    assert spaced[1::2].isnan().all()
