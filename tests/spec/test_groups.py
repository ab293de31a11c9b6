"""How layers are gathered into groups whose blocks have equal bytes."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire import Cache
from quire.memory.virtual.page_sizes import virtual_block_bytes, virtual_block_size
from quire.spec import KVSpec, LayerSpec, Span
from quire.spec.kv_spec import MAX_GROUPS, MAX_PADDING


def _spec(*kinds: tuple[int, LayerSpec]) -> KVSpec:
    return KVSpec(tuple(layer for count, layer in kinds for _ in range(count)))


def _taken(spec: KVSpec, num_tokens: int) -> float:
    """How many times the bytes of the tokens in them blocks of one size take; their edges not counted."""
    taken = sum(
        spec.block_bytes(1) / group.block_factor * group.span.num_kept(num_tokens) for group in spec.groups
    )
    return taken / spec.bytes_for(num_tokens)


GEMMA4 = _spec((50, LayerSpec(Span("window", 1024), 16, 256, 256)), (10, LayerSpec(Span(), 4, 512, 512)))


def test_a_wide_windowed_layer_shares_its_block_with_fewer_others() -> None:
    assert [len(group.layers) for group in GEMMA4.groups] == [10] + [5] * 10
    assert _taken(GEMMA4, 1) == _taken(GEMMA4, 32_768) == 1


def test_a_budget_for_ten_long_sequences_holds_nine() -> None:
    """Blocks at the edges of windows are what is left of the tenth."""
    num_tokens = 32_768
    cache = Cache(GEMMA4, memory=10 * GEMMA4.bytes_for(num_tokens), block_size=16)
    assert cache.num_blocks // cache.num_blocks_for(num_tokens) == 9


_KINDS = st.tuples(
    st.sampled_from([Span(), Span("window", 64), Span("window", 1024), Span("chunked", 512)]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([32, 48, 64, 80, 128]),
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(_KINDS, st.integers(1, 40), min_size=1, max_size=3))
@example({(Span(), 1, 128): 2, (Span(), 4, 32): 18})  # 7 groups of 3: padded by exactly 5 %
def test_groups_hold_every_layer_once_and_are_dense_where_they_can_be(kinds: dict) -> None:
    spec = _spec(*((n, LayerSpec(span, heads, dim, dim)) for (span, heads, dim), n in kinds.items()))
    groups = spec.groups
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(spec.layers)))
    for group in groups:
        of_kind = {(spec.layers[layer].span, spec.layers[layer].elements_per_token) for layer in group.layers}
        assert len(of_kind) == 1
        assert 0 < len(group.layers) <= group.max_layers
        assert group.bytes_per_block(16) <= spec.block_bytes(16)
    assert [group.span.kind for group in groups] == sorted(
        (group.span.kind for group in groups), key=lambda kind: kind != "full"
    )
    if len(kinds) == 1:
        assert len(groups) == 1
    is_dense = max(_taken(spec, 1), _taken(spec, 1 << 17)) <= 1 + MAX_PADDING
    for size in range(1, 41):  # groups of equal numbers of layers are no better where these are not dense
        count = sum(-(-n // size) for n in kinds.values())
        width = min(size, max(kinds.values())) * max(heads * 2 * dim for _, heads, dim in kinds)
        short = count * width / sum(n * heads * 2 * dim for (_, heads, dim), n in kinds.items()) - 1
        is_long_dense = all(
            -(-n // size) * width <= (1 + MAX_PADDING) * n * heads * 2 * dim
            for (_, heads, dim), n in kinds.items()
        )
        assert is_dense or short > MAX_PADDING or not is_long_dense or count > MAX_GROUPS


MANY_WINDOWS = _spec((31, LayerSpec(Span("window", 128), 4, 64, 64)), (1, LayerSpec(Span(), 4, 64, 64)))


def test_one_full_layer_among_many_windowed_ones_makes_a_handful_of_groups() -> None:
    """It has 8 times as many tokens to a block of as many bytes."""
    groups = MANY_WINDOWS.groups
    assert [(len(group.layers), group.tokens_per_block(16)) for group in groups] == [
        (1, 128), (8, 16), (8, 16), (8, 16), (7, 16)
    ]  # fmt: skip
    assert MANY_WINDOWS.tokens_per_node(16) == 128
    assert max(_taken(MANY_WINDOWS, 1), _taken(MANY_WINDOWS, 1 << 17)) <= 1 + MAX_PADDING


def test_a_budget_for_ten_sequences_of_many_windows_holds_nine() -> None:
    num_tokens = 32_768
    cache = Cache(MANY_WINDOWS, memory=10 * MANY_WINDOWS.bytes_for(num_tokens), block_size=16)
    assert cache.num_blocks // cache.num_blocks_for(num_tokens) == 9


def test_what_maps_each_layer_for_itself_has_blocks_that_take_as_much_in_every_layer() -> None:
    """Of a Gemma 4 shape a third of virtual memory was padding, when groups were of unequal numbers of layers."""
    block_size = virtual_block_size(GEMMA4)
    assert virtual_block_bytes(GEMMA4, block_size) / GEMMA4.block_bytes(block_size) == 1.5
    spec = GEMMA4.for_pieces()
    assert [(len(group.layers), group.block_factor) for group in spec.groups] == [(10, 2)] + [(10, 1)] * 5
    assert virtual_block_bytes(spec, block_size) == spec.block_bytes(block_size)
    assert _taken(spec, 1) == _taken(spec, 32_768) == 1
    uniform = KVSpec.uniform(num_layers=28, num_kv_heads=8, head_dim=128)
    assert uniform.for_pieces().groups == uniform.groups
