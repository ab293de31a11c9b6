"""Attention by Triton kernels: `write` and `run` as in `quire.attention.attention_backend`, on a card or interpreted.

The kernels are in `attention_kernels` and `kv_write_kernels`, the sizes of tiles in `attention_tiles`, a step's tables
in `step_tensors`.

Calls do not wait for the device and read no tensor on it: checks are of shapes, dtypes and places. A slot of -1 is
skipped. Grids follow from numbers of the batch that the host knows: rows, sequences, width of the tables.

With TRITON_INTERPRET=1, when triton is imported, kernels run on CPU tensors, for tests: in float32 and float16. The
interpreter's bfloat16 is wrong and refused.

Cost: a layer of a decode step is one launch (`attend`), or two if programs share a sequence (`merge_partials`). Formats
of codes add one that rotates the queries.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from quire.attention import AttentionOptions
from quire.attention.attention_checks import check_new_rows, check_run
from quire.attention.codecs import rotation_size
from quire.devices.cuda.attention_kernels import attend, attend_codes, merge_partials
from quire.devices.cuda.attention_tiles import (
    AMD_OPTIONS,
    NVIDIA_OPTIONS,
    SPLIT,
    AttentionTiles,
    attend_constants,
    column_tiles,
    launch_options,
    power_of_two,
    tiles_of,
)
from quire.devices.cuda.kv_write_kernels import rotate_queries, write_codes, write_rows
from quire.devices.cuda.step_tensors import DeviceBatch, device_batch
from quire.errors import ArgumentError
from quire.memory.view import KVView
from quire.spec import format_of
from quire.step import AttentionBatch

__all__ = ["TritonAttention", "attention_version"]

_HANDLE = "_triton_handle"
_MAX_PARTIAL_BYTES = 256 << 20
_PROGRAMS_PER_PROCESSOR = 4  # with that many programs, splits of a sequence need not run in parallel


def attention_version() -> str:
    """Changes when the bits of attention may change: with the kernels, the tiles, and triton."""
    digest = hashlib.sha256(triton.__version__.encode())
    for name in ("attention_kernels.py", "attention_tiles.py", "kv_write_kernels.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


class _ViewHandle(NamedTuple):
    """A view as arguments of kernels: pointers and strides; scales as their 16 bits."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    strides: tuple[int, ...]  # of blocks, heads, tokens, in k and v
    scale_strides: tuple[int, ...]
    is_latent: bool
    k_bits: int
    v_bits: int


class TritonAttention:
    """Attention on one device.

    architecture: "sm_90", "gfx942", ... or "interpreter". num_processors: of the device; it decides only how many
    programs share a sequence. Both are the device's by default.
    """

    def __init__(
        self, device: torch.device, architecture: str | None = None, num_processors: int | None = None
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.architecture = architecture or _architecture_of(device)
        self.num_processors = _processors_of(device) if num_processors is None else num_processors
        self._options: dict[str, Any] = {}
        if not is_interpreted():
            self._options = AMD_OPTIONS if torch.version.hip else NVIDIA_OPTIONS

    @property
    def version(self) -> str:
        """Of the kernels and of the row of the table of tiles."""
        return f"{attention_version()}-{self.architecture}"

    def write(self, view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write new keys and values to their slots, rounded to the storage's dtype, and then encoded if it has codes.

        Args:
            k: [T, num_kv_heads, k_head_dim]; v: [T, num_kv_heads, v_head_dim].
            slot_mapping: int64 [T], distinct; -1 is skipped.
        """
        check_new_rows(view, k, v, slot_mapping)
        handle = self._view_handle(view)
        self._check_places(("k", k), ("v", v), ("slot_mapping", slot_mapping))
        num_tokens = slot_mapping.numel()
        if num_tokens == 0:
            return
        k, v = _dense_rows(k.to(view.dtype)), _dense_rows(v.to(view.dtype))
        slots = slot_mapping.contiguous()
        heads, k_width, v_width = view.num_kv_heads, view.k_head_dim, view.v_head_dim
        new_strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        if handle.k_bits == 0:
            self._launch(
                write_rows,
                (num_tokens,),
                *(k, v, handle.k, handle.v, slots, *new_strides, *handle.strides),
                K_WIDTH=k_width,
                V_WIDTH=0 if handle.is_latent else v_width,
                K_COLUMNS=power_of_two(k_width),
                V_COLUMNS=power_of_two(v_width),
                NUM_HEADS=heads,
                HEADS=power_of_two(heads),
                BLOCK_SIZE=view.block_size,
            )
            return
        rotation = rotation_size(k_width)
        self._launch(
            write_codes,
            (num_tokens, heads),
            *(k, v, handle.k, handle.v, handle.k_scale, handle.v_scale),
            *(None if view.k_offset is None else view.k_offset.contiguous(), slots, *new_strides),
            *(*handle.strides, *handle.scale_strides),
            K_WIDTH=k_width,
            V_WIDTH=v_width,
            K_COLUMNS=max(32, power_of_two(k_width)),
            V_COLUMNS=max(32, power_of_two(v_width)),
            K_BITS=handle.k_bits,
            V_BITS=handle.v_bits,
            ROTATION=rotation,
            LOG_ROTATION=rotation.bit_length() - 1,
            BLOCK_SIZE=view.block_size,
            num_warps=1,
        )

    def run(
        self,
        view: KVView,
        query: torch.Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of every query row over its sequence's tokens in the view.

        Args:
            query: [T, num_q_heads, k_head_dim] of the view's dtype, row i of sequence s at position
                context_lengths[s] - q_len + i.
            out: [T, num_q_heads, v_head_dim] of query's dtype, to write into; allocated by default.

        Returns:
            [T, num_q_heads, v_head_dim] in the dtype of `query`.
        """
        check_run(view, query, batch, options, out)
        handle = self._view_handle(view)
        if query.dtype != view.dtype:
            raise ArgumentError(
                f"expected a query of the dtype of the keys and values, {view.dtype}, got {query.dtype}"
            )
        num_tokens, num_q_heads, k_width = query.shape
        if out is None:
            out = query.new_empty(num_tokens, num_q_heads, view.v_head_dim)
        self._check_places(("query", query), ("out", out))
        if out.stride(2) != 1:
            raise ArgumentError(f"expected out with a dense last dimension, got strides {out.stride()}")
        tables = device_batch(batch, self.device)
        query = _dense_rows(query)
        if handle.k_bits:
            query = self._rotated(query)
        launch = _AttentionLaunch(
            view,
            handle,
            query,
            out,
            tables,
            options,
            self._tensor_of(options.sinks),
            self._tensor_of(options.slopes),
        )
        tiles = tiles_of(
            self.architecture, query.dtype, k_width, view.v_head_dim, bool(handle.k_bits or handle.v_bits)
        )
        self._run(launch, batch, tiles)
        return out

    def _run(self, launch: _AttentionLaunch, batch: AttentionBatch, tiles: AttentionTiles) -> None:
        """The launches of a batch. Which of them it has decides no bits."""
        n, heads = batch.num_sequences, launch.num_kv_heads
        is_decode = batch.num_tokens == n
        num_splits = -(-launch.tables.max_context // SPLIT)
        decode_tiles = heads * -(-launch.group // tiles.decode_rows)
        num_single = launch.tables.num_single
        partial_floats = n * heads * launch.group * num_splits * launch.v_width
        splits = (
            num_single > 0
            and num_splits > 1
            and num_single * decode_tiles < _PROGRAMS_PER_PROCESSOR * self.num_processors
            and 4 * partial_floats <= _MAX_PARTIAL_BYTES
        )
        if splits:
            num_parts = partial_floats // launch.v_width
            floats = launch.tables.floats(partial_floats + 2 * num_parts)
            sums, stats = floats[:partial_floats], floats[partial_floats:]
            grid = (num_splits, decode_tiles, n)
            self._attend(launch, grid, "partial", tiles, sums, stats)
            self._merge(launch, (n, heads * launch.group), sums, stats, num_splits)
        elif is_decode:
            self._attend(launch, (n, decode_tiles), "single", tiles)
        if not is_decode:
            rows = tiles.prefill_rows
            num_tiles = batch.num_tokens // max(1, rows // launch.group) + n
            grid = (num_tiles, heads * -(-launch.group // rows))
            self._attend(launch, grid, "chunks" if splits else "rows", tiles)

    def _attend(
        self,
        launch: _AttentionLaunch,
        grid: tuple[int, ...],
        kind: str,
        tiles: AttentionTiles,
        sums: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
    ) -> None:
        handle, options, tables = launch.handle, launch.options, launch.tables
        self._launch(
            attend_codes if handle.k_bits or handle.v_bits else attend,
            grid,
            *(launch.query, handle.k, handle.v, handle.k_scale, handle.v_scale, launch.out, sums, stats),
            *(launch.sinks, launch.slopes, tables.query_start, tables.context_lengths, tables.block_tables),
            *(tables.context_lengths.numel(), tables.table_width),
            *(launch.query.stride(0), launch.query.stride(1), launch.out.stride(0), launch.out.stride(1)),
            *(*handle.strides, *handle.scale_strides),
            *(options.scale, options.softcap, max(1, options.window), max(1, options.chunk)),
            **attend_constants(
                kind,
                tiles,
                group=launch.group,
                k_width=launch.k_width,
                v_width=launch.v_width,
                block_size=launch.block_size,
                k_bits=handle.k_bits,
                v_bits=handle.v_bits,
                is_latent=handle.is_latent,
                has_span=launch.has_span,
                has_softcap=options.softcap > 0,
            ),
            **launch_options(kind, tiles),
        )

    def _merge(
        self,
        launch: _AttentionLaunch,
        grid: tuple[int, int],
        sums: torch.Tensor,
        stats: torch.Tensor,
        num_splits: int,
    ) -> None:
        options, tables = launch.options, launch.tables
        self._launch(
            merge_partials,
            grid,
            *(sums, stats, launch.out, launch.sinks, tables.query_start, tables.context_lengths, num_splits),
            *(launch.out.stride(0), launch.out.stride(1), max(1, options.window), max(1, options.chunk)),
            V_WIDTH=launch.v_width,
            V_COLUMNS=column_tiles(launch.k_width, launch.v_width)[2],
            SPLIT=SPLIT,
            HAS_SPAN=launch.has_span,
            num_warps=1,
        )

    def _rotated(self, query: torch.Tensor) -> torch.Tensor:
        num_tokens, num_heads, width = query.shape
        rotated = query.new_empty(query.shape)
        rotation = rotation_size(width)
        self._launch(
            rotate_queries,
            (num_tokens, num_heads),
            *(query, rotated, query.stride(0), query.stride(1)),
            WIDTH=width,
            COLUMNS=power_of_two(width),
            ROTATION=rotation,
            LOG_ROTATION=rotation.bit_length() - 1,
            num_warps=1,
        )
        return rotated

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """A launch on the device's current stream."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                kernel[grid](*arguments, **constants, **self._options)
        else:
            kernel[grid](*arguments, **constants, **self._options)

    def _view_handle(self, view: KVView) -> _ViewHandle:
        handle = view.__dict__.get(_HANDLE)
        if handle is None:
            self._check_places(("view.k", view.k), ("view.v", view.v))
            handle = _new_view_handle(view)
            object.__setattr__(view, _HANDLE, handle)
        return handle

    def _tensor_of(self, numbers: torch.Tensor | None) -> torch.Tensor | None:
        """An option's numbers on the device; copied there once."""
        if numbers is None or numbers.device == self.device:
            return numbers
        copy = getattr(numbers, _HANDLE, None)
        if copy is None or copy.device != self.device:
            copy = numbers.to(self.device)
            setattr(numbers, _HANDLE, copy)
        return copy

    def _check_places(self, *tensors: tuple[str, torch.Tensor]) -> None:
        for name, tensor in tensors:
            if tensor.device != self.device:
                raise ArgumentError(f"expected {name} on {self.device}, got it on {tensor.device}")


class _AttentionLaunch:
    """The arguments that all launches of a call have in common."""

    def __init__(
        self,
        view: KVView,
        handle: _ViewHandle,
        query: torch.Tensor,
        out: torch.Tensor,
        tables: DeviceBatch,
        options: AttentionOptions,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
    ) -> None:
        self.handle, self.query, self.out, self.tables = handle, query, out, tables
        self.options, self.sinks, self.slopes = options, sinks, slopes
        self.num_kv_heads, self.block_size = view.num_kv_heads, view.block_size
        self.k_width, self.v_width = view.k_head_dim, view.v_head_dim
        self.group = query.shape[1] // view.num_kv_heads
        self.has_span = bool(options.window or options.chunk)


def is_interpreted() -> bool:
    """Whether triton's interpreter runs the kernels, on CPU tensors."""
    return not isinstance(attend, triton.runtime.JITFunction)


def _architecture_of(device: torch.device) -> str:
    if is_interpreted():
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _new_view_handle(view: KVView) -> _ViewHandle:
    if is_interpreted() and view.dtype == torch.bfloat16:
        raise ArgumentError(
            "expected float32 or float16 under triton's interpreter, whose bfloat16 is wrong, got bfloat16"
        )
    bits: list[int] = []
    for name in (view.k_format, view.v_format):
        if name not in ("", "int8", "int4"):
            raise ArgumentError(f"expected keys and values as numbers, int8 or int4, got format {name!r}")
        bits.append({"": 0, "int8": 8, "int4": 4}[name])
    for name, width in ((view.k_format, view.k_head_dim), (view.v_format, view.v_head_dim)):
        if name and width % format_of(name).codes:
            raise ArgumentError(f"expected an even width of a head in format {name!r}, got {width}")
    scales = [None if scale is None else scale.view(torch.int16) for scale in (view.k_scale, view.v_scale)]
    return _ViewHandle(
        k=view.k,
        v=view.v,
        k_scale=scales[0],
        v_scale=scales[1],
        strides=view.k.stride()[:3] + view.v.stride()[:3],
        scale_strides=tuple(
            stride for scale in scales for stride in ((1, 1, 1) if scale is None else scale.stride()[:3])
        ),
        is_latent=view.k_scale is None and view.k.data_ptr() == view.v.data_ptr(),
        k_bits=bits[0],
        v_bits=bits[1],
    )


def _dense_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
