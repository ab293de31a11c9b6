"""Products, reductions and norms of a card: right in float64, and a row's bits depend on that row alone.

Triton's interpreter runs the kernels on CPU tensors, in float32 and float16. Rows alone are compared with the same rows
among others by bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures import tiny
from torch import nn
from torch.nn import functional as F

from quire.errors import UnsupportedModelError

pytest.importorskip("triton")
from quire.devices.cuda import exact_operators, product_kernels, row_kernels
from quire.devices.cuda.exact_operators import ExactOperators
from quire.devices.cuda.product_kernels import TILES, UNALIGNED_TILES, Tile, choose_tile

DTYPES = [torch.float32, torch.float16]
# The interpreter truncates a sum to float16; a card rounds.
RELATIVE_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3}
ROWS = [1, 2, 8, 17, 65]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_dead_memory(x: torch.Tensor) -> torch.Tensor:
    """x as a view of a larger array that is NaN elsewhere, with other strides and another alignment."""
    whole = x.new_full([size + 3 for size in x.shape], float("nan"))
    view = whole[tuple(slice(1, size + 1) for size in x.shape)]
    return view.copy_(x)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.shape == expected.shape
    error = (result.double() - expected.double()).abs().max()
    assert error <= RELATIVE_ERROR[dtype] * max(1.0, float(expected.double().abs().max()))


# -- products --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 1, 1), (3, 33, 70), (17, 40, 1500), (5, 64, 2048)])
@pytest.mark.parametrize("by_columns", [True, False])
def test_a_product_is_right(dtype: torch.dtype, num_rows: int, n: int, k: int, by_columns: bool) -> None:
    a, bias = random(num_rows, k, dtype=dtype), random(n, dtype=dtype, seed=2)
    weight = random(n, k, dtype=dtype, seed=1) / k**0.5
    b = weight.t() if by_columns else weight.t().contiguous()
    expected = a.double() @ b.double()
    assert_close(product_kernels.multiply(a, b), expected, dtype)
    result = product_kernels.multiply(in_dead_memory(a), in_dead_memory(b), in_dead_memory(bias))
    assert_close(result, expected + bias.double(), dtype)
    assert torch.equal(result, product_kernels.multiply(a, b, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(40, 96), (33, 1100)])
def test_a_row_of_a_product_has_its_bits_at_any_number_of_rows(dtype: torch.dtype, n: int, k: int) -> None:
    a, b = random(300, k, dtype=dtype), random(k, n, dtype=dtype, seed=1)
    bias = random(n, dtype=dtype, seed=2)
    together = product_kernels.multiply(a, b, bias)
    for num_rows in ROWS:
        rows = slice(100, 100 + num_rows)
        assert torch.equal(product_kernels.multiply(a[rows], b, bias), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tile_and_form_of_the_sum_change_no_bit(dtype: torch.dtype) -> None:
    a, b = random(1, 18, 1100, dtype=dtype), random(1, 1100, 33, dtype=dtype, seed=1)
    bias = random(1, 18, 33, dtype=dtype, seed=2)
    keys = [key for key in TILES if key[1] == dtype.itemsize]
    tiles = {tile for key in keys for _, tiles in TILES[key] for tile in tiles}
    shapes = {(tile.block_m, tile.block_n) for tile in tiles | {UNALIGNED_TILES[key] for key in keys}}
    expected = product_kernels.multiply_batch(a, b, bias)
    assert len(shapes) >= 4
    for block_m, block_n in shapes:
        for is_apart in (True, False):
            tile = Tile(block_m, block_n, 4, 1)
            result = product_kernels.multiply_batch(a, b, bias, is_apart=is_apart, tile=tile)
            assert torch.equal(result, expected), (tile, is_apart)


def test_zeros_behind_the_last_number_of_k_change_no_bit() -> None:
    a, b = random(3, 700), random(700, 20, seed=1)
    expected = product_kernels.multiply(a, b)
    for length in (701, 1024, 1025, 3000):
        padded = F.pad(a, (0, length - 700)), F.pad(b, (0, 0, 0, length - 700))
        assert torch.equal(product_kernels.multiply(*padded), expected)


def test_a_wider_product_has_the_same_columns() -> None:
    a, b = random(3, 1200), random(1200, 300, seed=1)
    expected = product_kernels.multiply(a, b)
    assert torch.equal(product_kernels.multiply(a, b[:, :1]), expected[:, :1])
    assert torch.equal(product_kernels.multiply(b.t()[:7], a.t()).t(), expected[:, :7])


def test_every_shape_has_a_tile_and_the_choice_of_slices_is_by_the_tiles() -> None:
    for arch, num_bytes in TILES:
        for num_rows in (1, 16, 17, 64, 65, 100_000):
            for is_aligned in (True, False):
                tile, is_apart = choose_tile(arch, num_bytes, num_rows, 4096, 4096, 1, is_aligned)
                assert not is_apart or -(-num_rows // tile.block_m) * (4096 // tile.block_n) < 304
    assert choose_tile("sm_90", 2, 1, 1024, 3072) == (Tile(64, 16, 4, 8), True)
    assert choose_tile("sm_90", 2, 8192, 4096, 4096) == (Tile(128, 128, 8, 3), False)


def test_tiles_of_one_architecture_use_one_matrix_instruction() -> None:
    """wgmma begins at 64 rows, tcgen05 at 128, mfma of 32 rows at 32 and 32; smaller tiles use another instruction."""
    least = {"sm_80": (16, 8), "sm_86": (16, 8), "sm_90": (64, 8), "sm_100": (128, 8), "gfx942": (32, 32)}
    for (arch, num_bytes), by_rows in TILES.items():
        tiles = [tile for _, tiles in by_rows for tile in tiles] + [UNALIGNED_TILES[arch, num_bytes]]
        if num_bytes == 2 or arch == "gfx942":
            assert all(tile.block_m >= least[arch][0] and tile.block_n >= least[arch][1] for tile in tiles)
            assert arch != "sm_90" or all(tile.num_warps % 4 == 0 for tile in tiles)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_columns", [True, False])
def test_grouped_products_are_products_of_the_groups(dtype: torch.dtype, by_columns: bool) -> None:
    counts = [3, 0, 1, 20, 0]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    a, bias = random(26, 70, dtype=dtype), random(5, 33, dtype=dtype, seed=2)
    b = random(5, 33, 70, dtype=dtype, seed=1).mT if by_columns else random(5, 70, 33, dtype=dtype, seed=1)
    result = product_kernels.multiply_groups(in_dead_memory(a), b, ends, bias)
    assert torch.equal(result[24:], torch.zeros_like(result[24:]))
    first = 0
    for group, end in enumerate(ends.tolist()):
        if end > first:
            rows = product_kernels.multiply(a[first:end], b[group], bias[group])
            assert torch.equal(result[first:end], rows)
        first = end


def test_a_batch_of_products_is_its_products() -> None:
    a, b = random(4, 3, 50), random(4, 50, 9, seed=1)
    together = product_kernels.multiply_batch(a, b)
    shared = product_kernels.multiply_batch(a, b[:1].expand(4, 50, 9))
    for index in range(4):
        assert torch.equal(together[index], product_kernels.multiply(a[index], b[index]))
        assert torch.equal(shared[index], product_kernels.multiply(a[index], b[0]))


@pytest.mark.parametrize("shapes", [((1, 3, 4), (1, 5, 2)), ((1, 3, 4), (2, 4, 2))])
def test_operands_of_other_shapes_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(RuntimeError, match="expected"):
        product_kernels.multiply_batch(torch.zeros(shapes[0]), torch.zeros(shapes[1]))
    with pytest.raises(RuntimeError, match="expected"):
        product_kernels.multiply(torch.zeros(2, 3), torch.zeros(3, 4).half())


def test_empty_products() -> None:
    assert product_kernels.multiply(torch.zeros(0, 3), torch.zeros(3, 4)).shape == (0, 4)
    assert torch.equal(product_kernels.multiply(torch.zeros(2, 0), torch.zeros(0, 4)), torch.zeros(2, 4))


# -- operators under the mode ----------------------------------------------------------------------------

# Each computes rows [n, 5, 70] -> [n, ...], every row of the first dimension on its own.
ROW_OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "addmm": lambda x: torch.addmm(torch.ones(3).to(x), x[:, 0], torch.ones(70, 3).to(x), beta=0.5, alpha=2),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x[..., :6].argmin(1, keepdim=True),
    "argsort": lambda x: x.round().argsort(1),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(1, 5, 5).to(x), x, x.mT, alpha=0.25),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum of the middle": lambda x: x[..., :6].cumsum(1),
    "einsum": lambda x: torch.einsum("abc,adc->abd", x, x),
    "group_norm": lambda x: F.group_norm(x.mT, 7, torch.ones(70).to(x), torch.ones(70).to(x)),
    "layer_norm": lambda x: F.layer_norm(x, (70,), torch.arange(70.0).to(x), torch.ones(70).to(x)),
    "layer_norm of two dimensions": lambda x: F.layer_norm(x, (5, 70)),
    "linear": lambda x: F.linear(x, torch.ones(9, 70).to(x), torch.arange(9.0).to(x)),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp((1, 2), keepdim=True),
    "matmul": lambda x: x @ x.mT,
    "matmul with a vector": lambda x: x @ torch.ones(70).to(x),
    "max": lambda x: x.max(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of the middle": lambda x: x.mean(1),
    "min": lambda x: x[..., :6].min(1),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "rms_norm": lambda x: F.rms_norm(x, (70,), torch.arange(70.0).to(x)),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], is_causal=True
    ),
    "softmax": lambda x: x.softmax(-1),
    "softmax in float32": lambda x: x.softmax(-1, dtype=torch.float32),
    "softmax of the middle": lambda x: x[..., :6].softmax(1),
    "sort": lambda x: x.round().sort(dim=-1, descending=True, stable=True),
    "std": lambda x: x[..., :6].std(1, unbiased=False, keepdim=True),
    "sum": lambda x: x.sum(-1),
    "sum of two": lambda x: x.sum((1, 2)),
    "topk": lambda x: x.topk(3),
    "var": lambda x: x.var(-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
}
MODES: dict[str, Callable[[], Any]] = {"inference": torch.inference_mode, "no_grad": torch.no_grad}


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_an_operator_gives_the_result_of_torch_and_a_row_its_bits(name: str, dtype: torch.dtype) -> None:
    operator, x = ROW_OPERATORS[name], random(4, 5, 70, dtype=dtype)
    in_mode = (
        "inference" if name == "scaled_dot_product_attention" else ("inference", "no_grad")[len(name) % 2]
    )
    with MODES[in_mode]():
        expected = tensors(operator(x.double() if name != "softmax in float32" else x))
        with ExactOperators():
            together = tensors(operator(x))
            alone = [tensors(operator(x[row : row + 1].clone())) for row in (0, 2)]
            strided = tensors(operator(in_dead_memory(x)))
    for index, result in enumerate(together):
        if result.is_floating_point():
            assert_close(result, expected[index], dtype)
            assert result.dtype is (torch.float32 if name == "softmax in float32" else dtype)
        else:
            assert torch.equal(result, expected[index])
        assert torch.equal(alone[0][index], result[:1])
        assert torch.equal(alone[1][index], result[2:3])
        assert torch.equal(strided[index], result)


def test_whole_tensors_are_reduced() -> None:
    x = random(5, 3, 7)
    with torch.inference_mode(), ExactOperators():
        results = [
            x.sum(),
            x.mean(),
            x.std(),
            x.argmax(),
            x.max(),
            x.min(),
            x.norm(),
            x.sum((0, 2)),
            x.mean((0, 1)),
        ]
    wide = x.double()
    expected = [
        wide.sum(),
        wide.mean(),
        wide.std(),
        x.argmax(),
        x.max(),
        x.min(),
        wide.norm(),
        wide.sum((0, 2)),
    ]
    for result, value in zip(results, [*expected, wide.mean((0, 1))], strict=True):
        assert_close(result, value, torch.float32)


def test_softmax_of_a_longer_row_has_the_same_bits_where_the_rest_is_masked() -> None:
    x = random(2, 1500) * 5
    for length in (3, 16, 1000, 1024, 1100):
        masked = x.clone()
        masked[:, length:] = float("-inf")
        with ExactOperators():
            assert torch.equal(masked.softmax(-1)[:, :length], x[:, :length].softmax(-1))
            assert torch.equal(masked.logsumexp(-1), x[:, :length].logsumexp(-1))
            assert torch.equal(x.cumsum(-1)[:, :length], x[:, :length].cumsum(-1))


def test_infinities_and_nan_are_those_of_torch() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf, -inf, -inf], [0, -inf, 1], [nan, 0, 1], [inf, 0, inf]])
    names = ("softmax", "log_softmax", "logsumexp", "argmax", "sum", "amax")
    for name in names:
        expected = getattr(x, name)(-1)
        with ExactOperators():
            assert_equal(getattr(x, name)(-1), expected)
    allowed = torch.tensor([[False, False], [True, False]])
    q = random(1, 1, 2, 8)
    with torch.inference_mode(), ExactOperators():
        result = F.scaled_dot_product_attention(q, q, q, attn_mask=allowed)
    assert torch.equal(result[0, 0, 0], torch.zeros(8))
    assert torch.equal(result[0, 0, 1], q[0, 0, 0])


def assert_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, equal_nan=True)


def test_equal_numbers_keep_their_order() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]]).repeat(1, 900)
    with ExactOperators():
        assert x.argmax(-1).tolist() == [1, 0]
        assert x.max(-1).indices.tolist() == [1, 0]
        assert x.min(-1).indices.tolist() == [3, 0]
        assert x.topk(3).indices.tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_add_adds_in_order(dtype: torch.dtype) -> None:
    index = torch.tensor([4, 1, 4, 0, 4])
    source, x = random(5, 300, dtype=dtype), random(6, 300, dtype=dtype, seed=1)
    expected = x.double().index_add(0, index, source.double())
    in_place, transposed = x.clone(), in_dead_memory(x.t())
    with ExactOperators():
        result = x.index_add(0, index, source)
        assert in_place.index_add_(0, index, source) is in_place
        transposed.index_add_(1, index, source.t())
        alone = torch.zeros(1, 300, dtype=dtype).index_add_(0, torch.zeros(3, dtype=torch.int64), source[::2])
        among = torch.zeros(6, 300, dtype=dtype).index_add_(0, index, source)
    assert_close(result, expected, dtype)
    assert torch.equal(in_place, result)
    assert torch.equal(transposed.t(), in_place)
    assert torch.equal(among[4:5], alone)


def test_results_are_written_where_the_operator_writes() -> None:
    a, out = random(3, 4), torch.zeros(3, 3)
    with ExactOperators():
        assert torch.mm(a, a.t(), out=out) is out
        total = torch.ones(3, 3)
        assert total.addmm_(a, a.t()) is total
    assert_close(out, a.double() @ a.double().t(), torch.float32)
    assert_close(total, 1 + a.double() @ a.double().t(), torch.float32)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: F.conv1d(x[:, None], x[:, None, :3]), "conv"),
        (lambda x: torch.cumprod(x, -1), "cumprod"),
        (lambda x: torch.zeros(4, 8).scatter_add(0, torch.zeros(4, 8, dtype=torch.int64), x), "scatter_add"),
        (lambda x: torch.zeros(8).index_put((torch.zeros(8, dtype=torch.int64),), x[0], True), "index_put"),
        (lambda x: x.scatter(0, torch.zeros(4, 8, dtype=torch.int64), x, reduce="add"), "scatter"),
        (torch.rand_like, "rand_like"),
        (lambda x: F.dropout(x, 0.5, training=True), "bernoulli|dropout"),
        (lambda x: x.double() @ x.double().t(), "float64"),
        (lambda x: torch.view_as_complex(x.view(4, 4, 2)).sum(), "complex"),
        (lambda x: torch.linalg.inv(x[:, :4]), "inv"),
    ],
)
def test_an_operator_that_is_not_known_is_refused_by_name(
    call: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    x = random(4, 8)
    with pytest.raises(UnsupportedModelError, match=name), torch.no_grad(), ExactOperators():
        call(x)


def test_integers_are_left_to_torch() -> None:
    x = torch.arange(12).view(3, 4)
    with ExactOperators():
        assert x.sum().item() == 66
        assert x.cumsum(0)[-1].tolist() == [12, 15, 18, 21]
        assert torch.histc(torch.arange(4.0), bins=4, min=0, max=3).tolist() == [1, 1, 1, 1]


def test_the_version_follows_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = exact_operators.version()
    assert before == exact_operators.version()
    monkeypatch.setattr(row_kernels, "version", lambda: "another")
    assert exact_operators.version() != before


def test_names_of_variants_are_unique() -> None:
    found = [variant.name for kernels in (product_kernels, row_kernels) for variant in kernels.variants()]
    assert len(found) == len(set(found)) > 300
    for kernels in (product_kernels, row_kernels):
        for variant in kernels.variants():
            assert not variant.signature.keys() & variant.constexprs.keys()
            assert set(variant.divisible) <= variant.signature.keys()


# -- fused operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [64, 70, 2500])
def test_fused_norms_and_activations_are_right(dtype: torch.dtype, n: int) -> None:
    x, residual = random(4, n, dtype=dtype), random(4, n, dtype=dtype, seed=1)
    weight = random(n, dtype=dtype, seed=2)
    normed, total = row_kernels.rms_norm(x, weight, 1e-5, residual)
    assert_close(total, x.double() + residual.double(), dtype)
    assert_close(normed, F.rms_norm(total.double(), (n,), weight.double(), 1e-5), dtype)
    alone, _ = row_kernels.rms_norm(in_dead_memory(x[2:3]), weight, 1e-5, in_dead_memory(residual[2:3]))
    assert torch.equal(alone, normed[2:3])
    both = torch.cat((x, residual), -1)
    product = row_kernels.silu_and_mul(*both.chunk(2, -1))
    assert_close(product, F.silu(x.double()) * residual.double(), dtype)
    assert torch.equal(row_kernels.silu_and_mul(x[2:3], residual[2:3]), product[2:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), [(16, 16), (20, 8), (80, 80)])
def test_rotary_turns_the_halves(dtype: torch.dtype, n: int, width: int) -> None:
    x = random(3, 2, n, dtype=dtype)
    angles = random(3, width // 2, seed=1).repeat(1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    turned = x[..., :width].double()
    halves = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
    expected = turned * cosines[:, None].double() + halves * sines[:, None].double()
    result = row_kernels.rotate(in_dead_memory(x), cosines, sines)
    assert_close(result[..., :width], expected, dtype)
    assert torch.equal(result[..., width:], x[..., width:])


# -- whole models ----------------------------------------------------------------------------------------


def one_layer(name: str) -> nn.Module:
    """The tiny model with its last layer alone: of two, it has the experts."""
    model: Any = tiny(name).eval()
    layers = model.model.layers
    model.model.layers = nn.ModuleList([layers[-1]])
    return model


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "deepseek_v3",
        *(
            pytest.param(name, marks=pytest.mark.ci)
            for name in ("gemma3_text", "gpt_oss", "mixtral", "olmo2", "phimoe", "qwen3_moe")
        ),
    ],
)
def test_a_sequence_of_a_model_has_its_bits_alone_and_before_more_tokens(name: str) -> None:
    """Multiples of 8 tokens: on a CPU torch computes the last elements of an array in another way than the rest."""
    model = one_layer(name)
    ids = torch.randint(3, 130, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids[:, :8], use_cache=False).logits
        with ExactOperators():
            together = model(ids[:, :8], use_cache=False).logits
            alone = model(ids[1:, :8], use_cache=False).logits
            longer = model(ids[1:], use_cache=False).logits
    assert_close(together, expected, torch.float32)
    assert torch.equal(together[1:], alone)
    if name != "gpt_oss":  # the eager attention of transformers puts the sink behind the last token
        assert torch.equal(longer[:, :8], alone)
