"""The files of a placement heap: the place of each block's pieces, and how much of them is committed.

Not an owner: it counts no references. `placement_heap` decides which blocks are in use, `mapping` where they are
mapped. A "file" is a heap of the back end, be it a file or a device's memory.

A file holds `blocks_per_file` blocks, layer buffer after layer buffer, the pieces of a layer buffer side by side: block
u is in file u // blocks_per_file. If a huge page is a whole number of a layer buffer's pieces, every `frame_blocks`
blocks from the layer buffer's beginning on are a *frame*: one huge page, if one call committed all its blocks.

Invariants
    F1  a block's place never changes while its file exists.
    F2  `committed[layer_buffer, block_id]` bytes of a piece are committed, until `give_back` or `drop`.
    F3  `is_huge[layer_buffer][frame]`: the frame is one huge page.

Cost: `commit` and `give_back` one call to the machine for each run of neighbours and layer buffer.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from quire.errors import CapacityError
from quire.memory.placement.backend import PlacementBackend

__all__ = ["HeapFiles", "with_capacity_error"]


def with_capacity_error(call: Callable[..., Any], *args: Any) -> Any:
    """Make a call that takes a resource of the operating system; its refusal becomes a CapacityError."""
    try:
        return call(*args)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise CapacityError(
                f"the operating system gives no file descriptor for the memory of the KV cache, which needs one: "
                f"{error}; drop unneeded caches (a cache and its forks share one), raise the limit "
                '(ulimit -n), or use another storage: "growing" for a QuireCache, "paged" for an LLM'
            ) from error
        raise CapacityError(
            f"the operating system gives no memory for the KV cache: {error}; close sequences or lower the KV memory"
        ) from error


class HeapFiles:
    """Files of `blocks_per_file` blocks, `max_blocks` in all, with a piece of `piece_bytes[layer_buffer]` in every
    layer buffer."""

    def __init__(
        self, piece_bytes: tuple[int, ...], max_blocks: int, blocks_per_file: int, backend: PlacementBackend
    ) -> None:
        self.piece_bytes = piece_bytes
        self.max_blocks = max_blocks
        self.blocks_per_file = blocks_per_file
        self.backend = backend
        self.frame_blocks = [self._frame_blocks(size) for size in piece_bytes]
        alignment = backend.huge_bytes if any(self.frame_blocks) else backend.page_bytes
        self._buffer_offsets: list[int] = []
        self._file_bytes = 0
        for size in piece_bytes:
            self._buffer_offsets.append(self._file_bytes)
            self._file_bytes += -(-size * blocks_per_file // alignment) * alignment
        self.files: dict[int, Any] = {}
        # For `max_blocks` blocks; only the entries of used blocks cost memory.
        self._committed = np.zeros((len(piece_bytes), max_blocks), np.int32)
        self.is_huge = [np.zeros(max_blocks // each + 1 if each else 0, bool) for each in self.frame_blocks]

    def alignment_for(self, num_positions: int, sizes: Sequence[int]) -> int:
        """Alignment of a range that maps `sizes` bytes a position: that of huge pages if its layer buffers can use
        one."""
        layer_buffers = zip(sizes, self.piece_bytes, self.frame_blocks, strict=True)
        has_frames = any(
            each and size == full and num_positions >= each for size, full, each in layer_buffers
        )
        return self.backend.huge_bytes if has_frames else self.backend.page_bytes

    # Files

    def make(self, index: int) -> None:
        """Make file `index`. *raises:* CapacityError: the machine refuses."""
        self.backend.budget.check(1)
        self.files[index] = with_capacity_error(self.backend.make_heap, self._file_bytes)
        self.backend.budget.add(1)

    def drop(self, indices: list[int]) -> None:
        """Free files without mappings."""
        for index in indices:
            start, stop = self.span(index)
            self.backend.drop_heap(self.files.pop(index))
            self.backend.budget.add(-1)
            self._committed[:, start:stop] = 0
            for each, is_huge in zip(self.frame_blocks, self.is_huge, strict=True):
                if each:
                    is_huge[start // each : -(-stop // each)] = False

    def next_index(self) -> int | None:
        """The lowest index without a file, or None if that file would lie beyond `max_blocks`."""
        index = 0
        while index in self.files:
            index += 1
        return index if index * self.blocks_per_file < self.max_blocks else None

    def span(self, index: int) -> tuple[int, int]:
        """The blocks of a file, [start, stop)."""
        return index * self.blocks_per_file, min((index + 1) * self.blocks_per_file, self.max_blocks)

    # Pieces

    def place(self, block_id: int, layer_buffer: int) -> tuple[Any, int]:
        """The file of a piece, and its offset there."""
        index, place = divmod(block_id, self.blocks_per_file)
        return self.files[index], self._buffer_offsets[layer_buffer] + place * self.piece_bytes[layer_buffer]

    def addresses(self, block_ids: np.ndarray, layer_buffer: int) -> np.ndarray:
        """int64, addresses of the pieces of blocks, mapped into ranges or not."""
        index, place = np.divmod(block_ids, self.blocks_per_file)
        bases = np.array(
            [self.backend.heap_address(self.files[number]) for number in index.tolist()], np.int64
        )
        return bases + self._buffer_offsets[layer_buffer] + place * self.piece_bytes[layer_buffer]

    def adjacent(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Whether each block of `right` lies directly behind that of `left` in every layer buffer."""
        return (right == left + 1) & (left // self.blocks_per_file == right // self.blocks_per_file)

    def commit(self, block_ids: np.ndarray, piece_bytes: Sequence[int]) -> None:
        """Commit the first `piece_bytes` bytes of these blocks' pieces. *raises:* CapacityError: the machine
        refuses."""
        wanted = np.asarray(piece_bytes)[:, None]
        for layer_buffer in np.flatnonzero((self._committed[:, block_ids] < wanted).any(axis=1)).tolist():
            size = piece_bytes[layer_buffer]
            lacking = np.unique(block_ids[self._committed[layer_buffer, block_ids] < size])
            if size == self.piece_bytes[layer_buffer] and self.frame_blocks[layer_buffer]:
                lacking = self._commit_frames(layer_buffer, lacking)
            for first, count in self._runs(lacking, whole=size == self.piece_bytes[layer_buffer]):
                with_capacity_error(self.backend.commit, *self.place(first, layer_buffer), count * size)
                self._committed[layer_buffer, first : first + count] = size

    def give_back(self, block_ids: np.ndarray) -> None:
        """Return the memory of these blocks (ascending, mapped nowhere) to the machine."""
        for layer_buffer, size in enumerate(self.piece_bytes):
            for first, count in self._runs(
                block_ids[self._committed[layer_buffer, block_ids] > 0], whole=True
            ):
                with_capacity_error(self.backend.give_back, *self.place(first, layer_buffer), count * size)
                self._committed[layer_buffer, first : first + count] = 0
                if each := self.frame_blocks[layer_buffer]:
                    self.is_huge[layer_buffer][first // each : -(-(first + count) // each)] = False

    def copy(self, source: int, target: int, num_bytes: Sequence[int]) -> None:
        for layer_buffer, size in enumerate(num_bytes):
            if size:
                self.backend.copy(*self.place(source, layer_buffer), *self.place(target, layer_buffer), size)

    @property
    def committed_bytes(self) -> int:
        """Memory that all files take now, as the machine counts it."""
        return sum(self.backend.committed_bytes(file) for file in self.files.values())

    def _frame_blocks(self, size: int) -> int:
        """Pieces of this size in a huge page; 0 if it is not a whole number or files would begin within a huge page."""
        huge = self.backend.huge_bytes
        fits = (
            self.backend.merges and huge and huge % size == 0 and self.blocks_per_file % (huge // size) == 0
        )
        return huge // size if fits else 0

    def _commit_frames(self, layer_buffer: int, lacking: np.ndarray) -> np.ndarray:
        """Commit huge pages for the uncommitted frames that lie wholly among these ascending blocks; returns the
        rest."""
        each, size = self.frame_blocks[layer_buffer], self.piece_bytes[layer_buffer]
        if len(lacking) < each:
            return lacking
        frames, counts = np.unique(lacking // each, return_counts=True)
        for frame in frames[counts == each].tolist():
            block_ids = slice(frame * each, (frame + 1) * each)
            if self._committed[layer_buffer, block_ids].any():
                continue
            if not with_capacity_error(self.backend.commit_huge, *self.place(block_ids.start, layer_buffer)):
                break  # no huge page is free; the next call tries again
            self._committed[layer_buffer, block_ids] = size
            self.is_huge[layer_buffer][frame] = True
        return lacking[self._committed[layer_buffer, lacking] < size]

    def _runs(self, block_ids: np.ndarray, *, whole: bool) -> Iterator[tuple[int, int]]:
        """Runs of neighbours among ascending blocks, as (first, number); single blocks unless `whole` pieces are
        meant."""
        if len(block_ids):
            apart = (
                ~self.adjacent(block_ids[:-1], block_ids[1:]) if whole else np.ones(len(block_ids) - 1, bool)
            )
            cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(block_ids)]
            for start, stop in itertools.pairwise(cuts):
                yield int(block_ids[start]), stop - start
