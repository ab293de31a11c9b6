"""A payload of blocks against torch: gathered through the storage's own views, in the canonical order."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ArgumentError
from quire.memory.block_bytes import BlockWriter
from quire.memory.device_memory import HOST
from quire.memory.paged import PagedStorage
from quire.memory.placement import unsupported_reason
from quire.memory.virtual.virtual_storage import VirtualStorage, virtual_block_size
from quire.spec import KVSpec, LayerSpec, Span

NUM_BLOCKS = 16
FULL, WINDOW = Span(), Span("window", 8)
DTYPES = ("float32", "bfloat16", "float16")


def spec_of(shape: str, dtype: str) -> KVSpec:
    if shape == "uniform":
        return KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype=dtype)
    latent = LayerSpec(FULL, 1, 40, 32, latent=True)
    if shape == "latent":
        return KVSpec((latent,) * 3, dtype=dtype)
    if shape == "latents beside others":
        return KVSpec((latent, LayerSpec(WINDOW, 2, 16, 24), latent), dtype=dtype)
    # Groups of unequal shape and size, keys and values of unequal width, a layer that reads another's KV.
    wide, narrow = LayerSpec(WINDOW, 2, 16, 24), LayerSpec(FULL, 1, 32, 8)
    return KVSpec(
        (wide, narrow, wide, narrow, wide, LayerSpec(FULL, 1, 32, 8, shares_kv_with=3)), dtype=dtype
    )


class Pool:
    """A storage whose every element is random, and the torch twin: each block's keys and values of each layer."""

    def __init__(self, kind: str, spec: KVSpec, block_size: int, num_blocks: int = NUM_BLOCKS) -> None:
        self.spec = spec
        if kind == "virtual":
            block_size = virtual_block_size(spec, 4096)
            self.storage: Any = VirtualStorage(
                spec, num_blocks, block_size, max_model_len=4 * block_size, max_num_seqs=2
            )
        else:
            self.storage = PagedStorage(spec, num_blocks, block_size, max_blocks=num_blocks)
        self.block_size = block_size
        self.storage.fill(0.0)
        for group in spec.groups:
            for block_id in range(num_blocks):
                for layer in group.layers:
                    for part in self.parts(group, layer, block_id):
                        part.copy_(torch.randn(part.shape).to(part.dtype))

    def parts(self, group: Any, layer: int, block_id: int) -> list[torch.Tensor]:
        """K and V [heads, block_size, dim] of a block in a layer; K of a latent one."""
        if isinstance(self.storage, PagedStorage):
            view = self.storage.view(layer)
            return [view.k[block_id], view.v[block_id]][: len(group.stored_dims)]
        heap, slot = self.storage._heap, group.layers.index(layer)
        sizes = [0] * len(heap.piece_bytes)
        found = []
        buffers = [self.storage._buffer_of[2 * slot + kind] for kind in range(len(group.stored_dims))]
        for buffer, dim in zip(buffers, group.stored_dims, strict=True):
            sizes[buffer] = self.block_size * group.num_kv_heads * dim * self.storage.dtype.itemsize
        mapped = heap.reserve(1, sizes)
        heap.map([(mapped, [0], [block_id])])
        for buffer, dim in zip(buffers, group.stored_dims, strict=True):
            rows = mapped.tensor(buffer, self.storage.dtype)
            found.append(rows.view(self.block_size, group.num_kv_heads, dim).transpose(0, 1))
        return found

    def payload(self, block_ids: np.ndarray, num_tokens: int) -> np.ndarray:
        home = {layer: group for group in self.spec.groups for layer in group.layers}
        pieces = []
        for layer in sorted(home):
            group = home[layer]
            parts = [self.parts(group, layer, int(block_id)) for block_id in block_ids[group.index]]
            tokens = [torch.cat(part, 1)[:, :num_tokens] for part in zip(*parts, strict=True)]
            for head in range(group.num_kv_heads):
                pieces += [part[head].reshape(-1) for part in tokens]
        return torch.cat(pieces).view(torch.uint8).numpy()

    def close(self) -> None:
        self.storage.close()


KINDS = ["paged", "virtual"] if unsupported_reason() is None else ["paged"]


@pytest.fixture(params=["native", "python"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native":
        pytest.importorskip("quire._native")
    else:
        monkeypatch.setattr(HOST, "copied_by", "python")
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["uniform", "mixed", "latent", "latents beside others"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_payload_is_what_torch_gathers_and_comes_back(
    kind: str, shape: str, dtype: str, backend: str
) -> None:
    spec = spec_of(shape, dtype)
    for size in (1, 3, 16) if kind != "virtual" else (0,):
        pool = Pool(kind, spec, size)
        other = Pool("paged", spec, 5, num_blocks=3 * pool.block_size + 3)
        rng = np.random.default_rng(size)
        block_ids = _distinct(rng, NUM_BLOCKS, len(spec.groups), 3)
        for num_tokens in {1, pool.block_size, 2 * pool.block_size + 1, 3 * pool.block_size}:
            if num_tokens > 3 * pool.block_size:
                continue
            blocks = -(-num_tokens // pool.block_size)
            payload = pool.storage.read_blocks(block_ids, num_tokens)
            assert np.array_equal(payload, pool.payload(block_ids[:, :blocks], num_tokens))
            # Into a pool of another block size, and back out of it.
            blocks = -(-num_tokens // 5)
            elsewhere = _distinct(rng, other.storage.num_blocks, len(spec.groups), blocks)
            other.storage.write_blocks(elsewhere, payload, num_tokens)
            assert np.array_equal(other.storage.read_blocks(elsewhere, num_tokens), payload)
            assert np.array_equal(other.payload(elsewhere, num_tokens), payload)
        pool.close()
        other.close()


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_tokens_asked_for_are_touched(kind: str, backend: str) -> None:
    """From within a block to within a block; blocks without a block are left out."""
    spec = spec_of("mixed", "bfloat16")
    pool = Pool(kind, spec, 4)
    size = pool.block_size
    block_ids = np.arange(3 * len(spec.groups)).reshape(-1, 3)
    whole = pool.storage.read_blocks(block_ids, 3 * size)
    before = {(g.index, u): _bytes(pool, g, u) for g in spec.groups for u in range(NUM_BLOCKS)}
    first, last = size // 2, 2 * size + 1
    noise = np.random.default_rng(0).integers(0, 255, len(whole), np.uint8)
    pool.storage.write_blocks(block_ids, noise, last, first=first)  # the payload is one of three blocks
    after = pool.storage.read_blocks(block_ids, 3 * size)
    expected = whole.copy()
    for offset, row, start in _token_rows(spec, 3 * size):
        if first <= start < last:
            expected[offset : offset + row] = noise[offset : offset + row]
    assert np.array_equal(after, expected)
    for group in spec.groups:
        for block_id in set(range(NUM_BLOCKS)) - set(block_ids.reshape(-1).tolist()):
            assert np.array_equal(_bytes(pool, group, block_id), before[group.index, block_id])
    block_ids[1, 1] = -1
    out = np.full(len(whole), 7, np.uint8)
    pool.storage.read_blocks(block_ids, 3 * size, out=out)
    gap = _group_rows(spec, 3 * size, 1, size, 2 * size)
    assert (out[gap] == 7).all()
    assert np.array_equal(np.delete(out, gap), np.delete(after, gap))
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_may_begin_later_in_a_group(kind: str, backend: str) -> None:
    """What is behind an origin is what a payload of all tokens has; it takes the bytes that it holds."""
    spec = spec_of("mixed", "float16")
    pool = Pool(kind, spec, 4)
    size = pool.block_size
    num_tokens = 2 * size + size // 2 + 1
    groups = range(len(spec.groups))
    block_ids = np.arange(3 * len(groups)).reshape(-1, 3)
    whole = pool.storage.read_blocks(block_ids, num_tokens)
    ends = [0, 1, size, 2 * size, num_tokens - 1]

    def rows(origins: list[int]) -> np.ndarray:
        parts = [_group_rows(spec, num_tokens, group, origins[group], num_tokens) for group in groups]
        return np.sort(np.concatenate(parts))

    for origins in ([ends[(group * step + step) % 5] for group in groups] for step in range(5)):
        kept = rows(origins)
        lacking = block_ids.copy()
        for group, origin in enumerate(origins):
            lacking[group, : origin // size] = -1
        payload = pool.storage.read_blocks(lacking, num_tokens, origins=origins)
        assert np.array_equal(payload, whole[kept])
        # Back again, over noise, into blocks of which those before the origins are another's.
        for first in (0, size + 2):
            before = {(g, u): _bytes(pool, spec.groups[g], u) for g in groups for u in range(NUM_BLOCKS)}
            noise = np.random.default_rng(1).integers(0, 255, len(whole), np.uint8)
            elsewhere = block_ids + 1 if first else block_ids
            held = pool.storage.read_blocks(elsewhere, num_tokens)
            pool.storage.write_blocks(elsewhere, noise[kept], num_tokens, first=first, origins=origins)
            expected, at = held.copy(), rows([max(first, origin) for origin in origins])
            expected[at] = noise[at]
            assert np.array_equal(pool.storage.read_blocks(elsewhere, num_tokens), expected)
            for group in groups:
                for block_id in set(range(NUM_BLOCKS)) - set(elsewhere.reshape(-1).tolist()):
                    assert np.array_equal(_bytes(pool, spec.groups[group], block_id), before[group, block_id])
        pool.storage.write_blocks(block_ids, whole, num_tokens)
    for wrong, message in (
        ([0], "origins of at least 0"),
        ([-1, *[0] * (len(groups) - 1)], "origins"),
        ([0, 9 * num_tokens, *[0] * (len(groups) - 2)], "payload"),
    ):
        with pytest.raises(ArgumentError, match=message):
            pool.storage.write_blocks(block_ids, whole, num_tokens, origins=wrong)
    pool.close()


def _distinct(rng: np.random.Generator, num_blocks: int, num_groups: int, blocks: int) -> np.ndarray:
    """Blocks [groups, blocks] of which none stands twice."""
    return rng.permutation(num_blocks)[: num_groups * blocks].reshape(num_groups, blocks)


def _bytes(pool: Pool, group: Any, block_id: int) -> np.ndarray:
    parts = [part for layer in group.layers for part in pool.parts(group, layer, block_id)]
    return torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8).numpy().copy()


def _token_rows(spec: KVSpec, total: int) -> list[tuple[int, int, int]]:
    """Offset, bytes and token of every row of a payload."""
    found, offset = [], 0
    for layer in spec.layers:
        if layer.shares_kv_with is None:
            for _ in range(layer.num_kv_heads):
                for dim in (layer.k_head_dim, layer.v_head_dim):
                    for token in range(total):
                        found.append((offset, dim * spec.dtype_bytes, token))
                        offset += dim * spec.dtype_bytes
    return found


def _group_rows(spec: KVSpec, total: int, group: int, first: int, last: int) -> np.ndarray:
    layers = [i for i, layer in enumerate(spec.layers) if layer.shares_kv_with is None]
    rows, at = _token_rows(spec, total), 0
    found = []
    for layer in layers:
        count = 2 * spec.layers[layer].num_kv_heads * total
        if layer in spec.groups[group].layers:
            found += [np.arange(o, o + n) for o, n, token in rows[at : at + count] if first <= token < last]
        at += count
    return np.concatenate(found)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_native_and_plain_copies_agree(data: st.DataObject) -> None:
    pytest.importorskip("quire._native")
    kind = data.draw(st.sampled_from(KINDS))
    spec = spec_of(
        data.draw(st.sampled_from(["uniform", "mixed", "latent"])), data.draw(st.sampled_from(DTYPES))
    )
    pool = Pool(kind, spec, data.draw(st.integers(1, 9)), num_blocks=4)
    block_ids = np.array(
        [data.draw(st.lists(st.integers(-1, 3), min_size=3, max_size=3, unique=False)) for _ in spec.groups]
    )
    num_tokens = data.draw(st.integers(0, 3 * pool.block_size))
    first = data.draw(st.integers(0, num_tokens))
    native = pool.storage.read_blocks(block_ids, num_tokens, first=first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HOST, "copied_by", "python")
        plain = pool.storage.read_blocks(block_ids, num_tokens, first=first)
    assert np.array_equal(native, plain)
    pool.close()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 700), st.integers(0, 130), st.integers(0, 70), st.integers(0, 70))
def test_rows_of_any_length_and_alignment_come_and_go(
    num_rows: int, row_bytes: int, gap: int, ours: int, theirs: int
) -> None:
    native = pytest.importorskip("quire._native")
    rng = np.random.default_rng(num_rows * row_bytes)
    stride = row_bytes + gap
    payload = rng.integers(0, 256, ours + num_rows * row_bytes, np.uint8)
    storage = rng.integers(0, 256, theirs + num_rows * stride + 64, np.uint8)
    expected = storage.copy()
    for row in range(num_rows):
        at = theirs + row * stride
        expected[at : at + row_bytes] = payload[ours + row * row_bytes :][:row_bytes]
    pieces = np.array([[ours, storage.ctypes.data + theirs, num_rows, row_bytes, stride]], np.int64)
    native.copy_rows(payload, pieces, True)
    assert np.array_equal(storage, expected)
    back = np.zeros_like(payload)
    native.copy_rows(back, pieces, False)
    assert np.array_equal(back[ours:], payload[ours:])
    assert not back[:ours].any()


def check_places(
    pool: Pool, writer: BlockWriter, table: np.ndarray, start: int, stop: int, payload: np.ndarray
) -> None:
    """What is written to a writer's places, one after the other, is what `write_blocks` would have written."""
    places = writer.places(start, stop)
    if (table < 0).any():
        assert places is None
        return
    if places is None:  # the tokens of a block lie apart
        return
    at = 0
    for place in places:
        memoryview(place).cast("B")[:] = payload.data[at : at + len(place)]
        at += len(place)
    assert at == payload.nbytes
    num_tokens = (stop - start) * pool.block_size
    assert np.array_equal(pool.storage.read_blocks(table[:, start:stop], num_tokens), payload)


def test_a_payload_of_one_block_has_a_place_for_each_layer() -> None:
    pool = Pool("packed", spec_of("uniform", "bfloat16"), 16, num_blocks=4)
    writer = BlockWriter(pool.storage, np.array([[3, 1]]))
    places = writer.places(1, 2)
    assert places is not None
    num_layers = len(pool.storage.spec.layers)
    assert [len(place) for place in places] == [
        16 * pool.storage.spec.bytes_per_token // num_layers
    ] * num_layers
    assert writer.places(1, 3) is writer.places(2, 2) is writer.places(-1, 1) is None
    pool.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_writer_of_many_payloads_writes_what_write_blocks_does(data: st.DataObject) -> None:
    """Whole payloads and parts of some, in any order, with and without holes; also of one block as it lies there."""
    kind = data.draw(st.sampled_from(KINDS))
    spec = spec_of(
        data.draw(st.sampled_from(["uniform", "mixed", "latent"])), data.draw(st.sampled_from(DTYPES))
    )
    pool = Pool(kind, spec, data.draw(st.integers(1, 9)), num_blocks=20)
    size, num_groups = pool.block_size, len(spec.groups)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    table = rng.permutation(20)[: 5 * num_groups].reshape(num_groups, 5)
    if data.draw(st.booleans()):
        table[data.draw(st.integers(0, num_groups - 1)), data.draw(st.integers(0, 4))] = -1
    writer = BlockWriter(pool.storage, table)
    everything = np.arange(20)[None].repeat(num_groups, 0)
    for _ in range(4):
        start = data.draw(st.integers(0, 4))
        stop = data.draw(st.integers(start + 1, 5))
        num_tokens = data.draw(st.sampled_from([(stop - start) * size, (stop - start) * size - 1]))
        first = data.draw(st.sampled_from([0, 0, num_tokens // 2]))
        payload = rng.integers(0, 255, (stop - start) * size * spec.bytes_per_token, np.uint8)
        before = pool.storage.read_blocks(everything, 20 * size)
        writer.write(start, stop, payload, num_tokens, first=first)
        written = pool.storage.read_blocks(everything, 20 * size)
        pool.storage.write_blocks(everything, before, 20 * size)
        pool.storage.write_blocks(table[:, start:stop], payload, num_tokens, first=first)
        assert np.array_equal(pool.storage.read_blocks(everything, 20 * size), written)
        check_places(pool, writer, table, start, stop, payload)
    with pytest.raises(ArgumentError, match="expected a dense payload"):
        writer.write(0, 1, np.zeros(7, np.uint8), 1)
    pool.close()


def test_a_thread_writes_its_blocks_while_another_reads_others() -> None:
    spec = spec_of("uniform", "float32")
    pool = Pool("packed", spec, 16, num_blocks=8)
    mine, theirs = np.arange(4)[None], np.arange(4, 8)[None]
    kept = pool.storage.read_blocks(theirs, 64)
    noise = np.random.default_rng(1).integers(0, 255, len(kept), np.uint8)
    thread = threading.Thread(target=lambda: [pool.storage.write_blocks(mine, noise, 64) for _ in range(200)])
    thread.start()
    while thread.is_alive():
        assert np.array_equal(pool.storage.read_blocks(theirs, 64), kept)
    thread.join()
    assert np.array_equal(pool.storage.read_blocks(mine, 64), noise)
    pool.close()


def test_wrong_arguments_are_told() -> None:
    pool = Pool("packed", spec_of("uniform", "float32"), 4)
    with pytest.raises(
        ArgumentError, match=r"expected blocks \[1, 3\] for 9 tokens in blocks of 4, got \(1, 2\)"
    ):
        pool.storage.read_blocks([[0, 1]], 9)
    with pytest.raises(ArgumentError, match=r"expected blocks of -1 to 15, got 0 to 16"):
        pool.storage.read_blocks([[0, 16]], 8)
    with pytest.raises(ArgumentError, match=r"expected tokens 3 \.\. 2 within a payload of 2"):
        pool.storage.read_blocks([[0, 1]], 2, first=3)
    with pytest.raises(
        ArgumentError, match="expected a dense payload of uint8, 768 for each token, got 100 bytes"
    ):
        pool.storage.write_blocks([[0, 1]], np.zeros(100, np.uint8), 1)
    pool.close()
