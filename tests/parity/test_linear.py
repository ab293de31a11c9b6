"""The packed linear layer against two yardsticks: a float64 product within a proved bound, and, bit for bit, the
arithmetic each variant promises, written out over k in torch. Then what users rely on: a row's bits in any company.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from quire.devices.cpu.packed_weights import NativeWeight

_native = pytest.importorskip("quire._native")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ISAS = _native.supported_isas()
# The variants for bf16 pairs compute the other types as AVX-512 does, with the same code: emulated once.
CASES = [
    pytest.param(isa, dtype, id=f"{isa}-{dtype}")
    for isa in ISAS
    for dtype in DTYPES
    if dtype is torch.bfloat16 or isa not in ("emulated_avx512_bf16", "emulated_amx_bf16")
]
# (outputs, inputs): odd everywhere, multiples of every panel, one wider than a task's panels, one deeper than a range.
SHAPES = [(1, 1), (37, 51), (64, 64), (130, 97), (33, 600), (700, 300)]
ROWS = [1, 2, 5, 6, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 300]
UNIT_ROUNDOFF = {
    torch.float32: 0.0,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}  # of rounding the result


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before, native_before = torch.get_num_threads(), _native.num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    _native.set_num_threads(native_before)


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiply(
    packed: NativeWeight, x: torch.Tensor, bias: torch.Tensor | None = None, margin: int = 64
) -> torch.Tensor:
    """The product into the middle of a buffer full of NaN, whose margins must stay so."""
    x = x.contiguous()
    rows, num_outputs = x.shape[0], packed.num_outputs
    buffer = torch.full((rows * num_outputs + 2 * margin,), float("nan"), dtype=x.dtype)
    out = buffer[margin : margin + rows * num_outputs]
    packed._multiply(x, bias, out)
    assert buffer[:margin].isnan().all()
    assert buffer[-margin:].isnan().all()
    return out.view(rows, num_outputs)


def bound(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and how far K roundings in float32 and one to the result's type may lead from it.

    Higham, Accuracy and Stability of Numerical Algorithms, 3.1: n roundings cost n u / (1 - n u) of sum |x| |w|.
    """
    wide_x, wide_weight = x.double(), weight.double()
    exact, size = wide_x @ wide_weight.T, wide_x.abs() @ wide_weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    num_roundings = x.shape[1] + 4
    error = num_roundings * 2.0**-24 / (1 - num_roundings * 2.0**-24) * size
    return exact, error + UNIT_ROUNDOFF[x.dtype] * (exact.abs() + error) + 2.0**-25


def twin(x: torch.Tensor, weight: torch.Tensor, isa: str) -> torch.Tensor:
    """What `isa` computes, one k after the other. Products of two bf16 or f16 are exact in float32; of two float32, in
    float64, from where the sum is rounded once (twice in one of 2^29 cases).
    """
    a, w = x.float(), weight.float()
    sums = torch.zeros(len(a), len(w))
    pairs = weight.dtype is torch.bfloat16 and isa.endswith("bf16")
    depth = a.shape[1]

    def product(k: int) -> torch.Tensor:
        return a[:, k, None] * w[None, :, k] if k < depth else torch.zeros(1)

    if pairs and isa.endswith("amx_bf16"):
        for start in range(0, depth, 32):
            even, odd = torch.zeros_like(sums), torch.zeros_like(sums)
            for k in range(start, start + 32, 2):
                even, odd = even + product(k), odd + product(k + 1)
            sums = sums + (even + odd)
    elif pairs:
        for k in range(0, depth, 2):
            sums = (sums + product(k + 1)) + product(k)
    else:
        fused = weight.dtype is torch.float32 and isa != "portable"
        for k in range(depth):
            if fused:
                sums = (sums.double() + a[:, k, None].double() * w[None, :, k].double()).float()
            else:
                sums = sums + product(k)
    return sums.to(weight.dtype)


@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_close_to_float64(isa: str, dtype: torch.dtype) -> None:
    shapes = SHAPES[:4] if isa.startswith("emulated") else SHAPES
    for seed, (outputs, inputs) in enumerate(shapes):
        weight = random(outputs, inputs, dtype=dtype, seed=seed)
        packed = NativeWeight(weight, isa)
        assert torch.equal(packed.unpack(), weight)
        for rows in (1, 6, 33, 129):
            x = random(rows, inputs, dtype=dtype, seed=100 + rows)
            for bias in (None, random(outputs, dtype=dtype, seed=7)):
                exact, error = bound(x, weight, bias)
                result = multiply(packed, x, bias).double()
                assert ((result - exact).abs() <= error).all(), (outputs, inputs, rows)


@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_equals_its_twin(isa: str, dtype: torch.dtype) -> None:
    # The emulated variants and the plain multiply-add promise each rounding; real pair instructions are what they are.
    if dtype is torch.bfloat16 and isa in ("avx512_bf16", "amx_bf16"):
        pytest.skip("the processor's order within a pair product is not documented bit for bit")
    for outputs, inputs in [(37, 51), (50, 97), (33, 600)]:
        weight, x = random(outputs, inputs, dtype=dtype, seed=1), random(19, inputs, dtype=dtype, seed=2)
        assert torch.equal(multiply(NativeWeight(weight, isa), x), twin(x, weight, isa)), (outputs, inputs)


@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_a_row_has_the_same_bits_in_any_company(isa: str, dtype: torch.dtype) -> None:
    emulated = isa.startswith("emulated")
    counts = [2, 7, 17, 33, 65, 129] if emulated else ROWS
    for outputs, inputs in [(70, 97), (33, 600)] if emulated else [(130, 97), (33, 600), (700, 300)]:
        weight, bias = random(outputs, inputs, dtype=dtype, seed=1), random(outputs, dtype=dtype, seed=2)
        x = random(max(counts), inputs, dtype=dtype, seed=3)
        packed = NativeWeight(weight, isa)
        _native.set_num_threads(1)
        alone = torch.cat([multiply(packed, row[None], bias) for row in x])
        for num_threads in (1, 2):
            _native.set_num_threads(num_threads)
            for rows in counts:
                start = (len(x) - rows) // 2  # other rows than the first, at another place in their tile
                company = multiply(packed, x[start : start + rows], bias)
                assert torch.equal(company, alone[start : start + rows]), (outputs, inputs, rows, num_threads)


def test_rows_beyond_a_pass() -> None:
    weight = random(70, 65, dtype=torch.bfloat16, seed=1)
    x = random(1100, 65, dtype=torch.bfloat16, seed=2)
    for isa in ISAS:
        packed = NativeWeight(weight, isa)
        whole = multiply(packed, x)
        parts = torch.cat([multiply(packed, part) for part in x.split(11)])
        assert torch.equal(whole, parts), isa


@pytest.mark.parametrize("isa", ISAS)
def test_outputs_beyond_the_cache(isa: str) -> None:
    """Of 1 MiB a pass they may be written past the caches, where they are whole lines; deep inputs take wider tasks."""
    _native.set_num_threads(2)
    shapes = [(1056, 33)] if isa.startswith("emulated") else [(1056, 33), (1050, 33), (2080, 1100)]
    for outputs, inputs in shapes:
        weight, bias = (
            random(*shape, dtype=torch.bfloat16, seed=1) for shape in ((outputs, inputs), (outputs,))
        )
        x = random(510, inputs, dtype=torch.bfloat16, seed=2)
        packed = NativeWeight(weight, isa)
        for given in (None, bias):
            parts = torch.cat([multiply(packed, part, given) for part in x.split(30)])
            for margin in (64, 62):  # lines of the output that begin where the memory's do, or not
                assert torch.equal(multiply(packed, x, given, margin), parts), (outputs, inputs, margin)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_of_nan_spoils_no_other(isa: str) -> None:
    weight = random(45, 70, dtype=torch.bfloat16, seed=1)
    x = random(40, 70, dtype=torch.bfloat16, seed=2)
    packed = NativeWeight(weight, isa)
    clean = multiply(packed, x)
    x[13] = float("nan")
    spoiled = multiply(packed, x)
    assert spoiled[13].isnan().all()
    keep = torch.arange(40) != 13
    assert torch.equal(spoiled[keep], clean[keep])


@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_rows_and_columns_come_back(isa: str, dtype: torch.dtype) -> None:
    stored = random(77, 101, dtype=dtype, seed=1)
    stored[3, 5], stored[4, 6] = float("inf"), -0.0
    for weight in (stored, stored.T, stored[::2], stored[:, ::3]):
        packed = NativeWeight(weight, isa)
        assert torch.equal(packed.unpack(), weight)
        ids = torch.tensor([[0, weight.shape[0] - 1], [11, 11]])
        assert torch.equal(packed.gather_rows(ids), weight[ids])


def test_special_values_keep_their_bits() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(256, 256)
    for dtype in (torch.bfloat16, torch.float16):
        for isa in ISAS:
            packed = NativeWeight(every.view(dtype), isa)
            assert torch.equal(packed.unpack().view(torch.int16), every), (dtype, isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_results_round_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    # Each result is the sum of two numbers of the type, exact in float32; ties and overflow are among them.
    exponents = torch.arange(-10, 11)
    x = torch.cat([torch.ones(21, 1), 2.0 ** exponents[:, None]], 1).to(dtype)
    largest = torch.finfo(dtype).max
    weight = torch.tensor([[1.0, 1.0], [3.0, 2.0**-9], [1 + 2.0**-7, 2.0**-8], [largest, 1.0]]).to(dtype)
    expected = (x.float() @ weight.float().T).to(dtype)
    assert torch.equal(multiply(NativeWeight(weight, isa), x), expected)
    assert len(expected.unique()) > 20


def test_an_id_out_of_range_changes_nothing() -> None:
    packed = NativeWeight(random(10, 4, dtype=torch.float32, seed=1))
    out, ids = torch.full((2, 4), 7.0), torch.tensor([0, 10])
    with pytest.raises(IndexError, match=r"expected ids in \[0, 10\), got 10 at position 1"):
        packed.native.gather_rows(ids, out)
    assert (out == 7.0).all()


def test_bad_arguments_are_refused() -> None:
    for arguments, message in [
        ((torch.empty(0, 4),), "at least 1 x 1, .* got 0 x 4"),
        ((torch.zeros(4, 4, dtype=torch.float64),), "got float64"),
        ((torch.zeros(4, 4), "sse9"), "got 'sse9'"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.PackedWeight(*arguments)


def test_no_rows_is_no_work() -> None:
    packed = NativeWeight(random(10, 4, dtype=torch.float32, seed=1))
    assert packed.multiply(torch.empty(3, 0, 4), None).shape == (3, 0, 10)


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_forces_a_variant(isa: str) -> None:
    code = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
weight, x = (ctypes.c_float * 3 * 2)((1, 2, 3), (4, 5, 6)), (ctypes.c_float * 3)(1, 10, 100)
out = (ctypes.c_float * 2)()
packed = native.PackedWeight(weight)
packed.multiply(x, None, out)
print(packed.isa, list(out))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, _native.__file__],
        env={**os.environ, "QUIRE_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split(maxsplit=1) == [isa, "[321.0, 654.0]\n"]


@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_each_part_of_a_row_by_a_weight_of_its_own(isa: str, dtype: torch.dtype) -> None:
    weights = [NativeWeight(random(37, 51, dtype=dtype, seed=i), isa) for i in range(5)]
    for rows in (0, 1, 3, 40, 200):  # 200: each product calls the threads
        x = (
            random(rows, 5, 60, dtype=dtype, seed=rows)
            .transpose(0, 1)
            .contiguous()
            .transpose(0, 1)[..., 4:55]
        )
        buffer = torch.full((rows, 5, 50), float("nan"), dtype=dtype)
        for threads in (1, 3):
            _native.set_num_threads(threads)
            _native.multiply_each([weight.native for weight in weights], x, buffer[..., 7:44])
            for part, weight in enumerate(weights):
                assert torch.equal(buffer[:, part, 7:44], multiply(weight, x[:, part]))
        assert buffer[..., :7].isnan().all()
        assert buffer[..., 44:].isnan().all()


def test_parts_that_no_weights_go_with_are_refused() -> None:
    a, b = (NativeWeight(random(8, k, dtype=torch.float32, seed=0)).native for k in (8, 4))
    x, out = torch.zeros(3, 2, 8), torch.full((3, 2, 8), 7.0)
    for weights, given in (
        ([a, b], x),
        ([a], x),
        ([], x),
        ([a, a], x.to(torch.bfloat16)),
        ([a, a], x[..., :4]),
    ):
        with pytest.raises(ValueError, match="expected"):
            _native.multiply_each(weights, given, out)
    assert (out == 7).all()
