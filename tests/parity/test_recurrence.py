"""The kernels of the recurrences against the definition in torch, in every instruction set, on one thread and two."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from support.recurrence_case import KINDS, SLOTS, Case, make_case

from quire.devices import device_of
from quire.recurrence import (
    DeltaRule,
    LinearAttention,
    Mamba1Scan,
    Mamba2Scan,
    RealGatedUnit,
    recurrence_step,
)
from quire.step import RecurrenceStep

_native = pytest.importorskip("quire._native")

# One of each width of vectors: the others use those of avx512.
ISAS = [isa for isa in _native.supported_isas() if "bf16" not in isa]
each_isa = pytest.mark.parametrize("isa", ISAS)
each_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = [5, 1, 9]
SLOT_OF = [6, 0, 3]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _native.num_threads()
    _native.set_num_threads(2)
    yield
    _native.set_num_threads(before)


def step_for(isa: str, lengths: list[int], slots: list[int], checkpoints: tuple = ()) -> RecurrenceStep:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    step = recurrence_step(starts, slots, checkpoints)
    rows, copies = ([pair[i] for pair in step.checkpoints] for i in (0, 1))
    lists = (torch.tensor(one, dtype=torch.int64) for one in (starts, slots, rows, copies))
    step.native_handle = _native.RecurrenceStep(*lists, isa)
    return step


def run(case: Case, name: str, step: RecurrenceStep) -> tuple[torch.Tensor, torch.Tensor]:
    state = case.state.clone()
    return case.run(device_of(name).recurrence, state, step), state


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, in parts of the rms, or of the element where that is larger."""
    assert got.shape == want.shape
    return float(((got - want).abs() / want.abs().clamp(min=want.square().mean().sqrt())).max())


@each_isa
@each_kind
def test_kernels_compute_what_the_definition_says(kind: str, isa: str) -> None:
    for seed in range(2 if isa.startswith("emulated") else 6):
        case = make_case(kind, sum(LENGTHS), torch.float32, 100 + seed)
        step = step_for(isa, LENGTHS, SLOT_OF, ((4, 8), (2, 7)))
        got, state = run(case, "native", step)
        want, want_state = run(case, "python", step)
        assert error_of(got, want) < 1e-5
        assert error_of(state, want_state) < 1e-5


@each_isa
@each_kind
def test_threads_cuts_and_company_change_no_bit(kind: str, isa: str) -> None:
    case = make_case(kind, sum(LENGTHS), torch.bfloat16, 200)
    case.state[1] = torch.nan  # nobody's
    want, want_state = run(case, "native", step_for(isa, LENGTHS, SLOT_OF))
    _native.set_num_threads(1)
    got, state = run(case, "native", step_for(isa, LENGTHS, SLOT_OF))
    assert torch.equal(got, want)
    used = [slot for slot in range(SLOTS) if slot != 1]
    assert torch.equal(state[used], want_state[used])
    state, kernels = case.state.clone(), device_of("native").recurrence
    for cut in pairwise([0, 2, 5, 6, 7, 14, 15]):
        slot = SLOT_OF[(cut[0] >= 5) + (cut[0] >= 6)]
        part = case.run(kernels, state, step_for(isa, [cut[1] - cut[0]], [slot]), slice(*cut))
        assert torch.equal(part, want[slice(*cut)])
    assert torch.equal(state[used], want_state[used])


def test_sizes_of_real_layers() -> None:
    torch.manual_seed(0)
    rows, kernels = 40, [device_of("native").recurrence, device_of("python").recurrence]
    step = recurrence_step([0, 37, 40], [1, 0])
    q, k, v = (torch.randn(rows, 2, 128) for _ in range(3))
    g, beta = -torch.rand(rows, 2) * 0.1, torch.rand(rows, 2)
    states = [torch.zeros(2, 2, 128, 128) for _ in kernels]
    results = [
        one.compute(DeltaRule(state, q, k, v, g, beta, scale=128**-0.5, normalize=True), step)
        for one, state in zip(kernels, states, strict=True)
    ]
    assert error_of(*results) < 1e-5
    assert error_of(*states) < 1e-5
    b, c = torch.randn(rows, 1, 128), torch.randn(rows, 1, 128)
    x, dt, a = torch.randn(rows, 4, 64), torch.rand(rows, 4) * 0.1, -torch.tensor([1.0, 4.0, 8.0, 16.0])
    states = [torch.zeros(2, 4, 64, 128) for _ in kernels]
    results = [
        one.compute(Mamba2Scan(state, x, dt, a, b, c, torch.ones(4)), step)
        for one, state in zip(kernels, states, strict=True)
    ]
    assert error_of(*results) < 1e-5
    assert error_of(*states) < 1e-5
    x, dt, a = torch.randn(rows, 48), torch.rand(rows, 48) * 0.1, -torch.arange(1.0, 17.0).expand(48, 16)
    step = recurrence_step([0, 1, 40], [1, 0])
    states = [torch.randn(2, 48, 16, generator=torch.Generator().manual_seed(2)) for _ in kernels]
    results = [
        one.compute(Mamba1Scan(state, x, dt, a, b[:, 0, :16], c[:, 0, :16], torch.ones(48)), step)
        for one, state in zip(kernels, states, strict=True)
    ]
    assert error_of(*results) < 1e-5
    assert error_of(*states) < 1e-5


@each_isa
def test_a_row_alone_where_a_state_of_whole_vectors_lies_gives_the_same_bits(isa: str) -> None:
    torch.manual_seed(1)
    rows, heads, kernels = 5, 3, device_of("native").recurrence
    together, alone = step_for(isa, [rows], [1]), step_for(isa, [1], [1])
    x, b, c = torch.randn(rows, heads, 40), torch.randn(rows, 1, 32), torch.randn(rows, 1, 32)
    dt, a, d = torch.rand(rows, heads), -torch.rand(heads) * 4, torch.ones(heads)
    dt1, a1, d1 = torch.rand(rows, 40) * 0.1, -torch.rand(40, 32) * 16, torch.ones(40)
    q, k, v = (torch.randn(rows, heads, 64) for _ in range(3))
    calls = {
        "mamba1": ((40, 32), lambda state, at: Mamba1Scan(state, x[at, 0], dt1[at], a1, b[at, 0], c[at, 0], d1)),
        "mamba2": ((heads, 40, 32), lambda state, at: Mamba2Scan(state, x[at], dt[at], a, b[at], c[at], d)),
        "linear attention": ((heads, 64, 64), lambda state, at: LinearAttention(state, q[at], k[at], v[at], a)),
    }  # fmt: skip
    for name, (shape, call) in calls.items():
        states = torch.randn(1, *shape).expand(2, *shape).clone(), torch.zeros(2, *shape)
        states[1].copy_(states[0])
        want = kernels.compute(call(states[0], slice(0, rows)), together)
        got = torch.cat([kernels.compute(call(states[1], slice(row, row + 1)), alone) for row in range(rows)])
        assert torch.equal(got, want), name
        assert torch.equal(*states), name


@each_isa
def test_a_rate_that_is_no_number_is_not_hidden(isa: str) -> None:
    a = torch.full((2, 16), -1.0)
    a[1, 3] = torch.nan
    ones = torch.ones(1, 16)
    for rows in (1, 2):
        y = device_of("native").recurrence.compute(
            Mamba1Scan(
                torch.ones(1, 2, 16),
                torch.ones(rows, 2),
                torch.full((rows, 2), 0.1),
                a,
                ones.expand(rows, 16),
                ones.expand(rows, 16),
                None,
            ),
            step_for(isa, [rows], [0]),
        )
        assert y[:, 0].isfinite().all()
        assert y[:, 1].isnan().all()


@each_isa
def test_the_decay_is_within_two_units_in_the_last_place(isa: str) -> None:
    num = 2000
    log_a = torch.cat([-torch.logspace(-9, 1.93, num - 3), torch.tensor([0.0, -87.0, -0.0])])
    state, x = torch.ones(1, num), torch.zeros(1, num)
    got = device_of("native").recurrence.compute(
        RealGatedUnit(state, x, log_a[None]), step_for(isa, [1], [0])
    )[0]
    want = log_a.double().exp()
    unit = torch.finfo(torch.float32).eps * 2.0 ** want.log2().floor()
    assert ((got.double() - want).abs() / unit).max() <= 2
    assert got[-1] == 1
    far = torch.tensor([[-90.0, -104.5, -1e30, -torch.inf, torch.nan]])
    got = device_of("native").recurrence.compute(
        RealGatedUnit(torch.ones(1, 5), torch.zeros(1, 5), far), step_for(isa, [1], [0])
    )[0]
    assert (got[:4] < 1e-38).all()
    assert got[3] == 0
    assert got[4].isnan()


@each_isa
def test_the_weight_of_an_input_is_right_where_the_decay_is_nearly_one(isa: str) -> None:
    log_a = -torch.logspace(-9, 2, 999)
    got = device_of("native").recurrence.compute(
        RealGatedUnit(torch.zeros(1, 999), torch.ones(1, 999), log_a[None]), step_for(isa, [1], [0])
    )[0]
    want = (-torch.expm1(2 * log_a.double())).sqrt()
    assert ((got.double() - want) / want).abs().max() < 3e-7
