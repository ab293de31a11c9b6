"""The packed form of a model's linear weights, kept in a file from one start to the next and mapped.

A start that finds its file packs nothing, reads no dense weight and allocates no memory for one: the kernels read the
mapped file, whose pages all processes share and the kernel may take back under pressure. Where memory is ample they are
then moved to huge pages of the process's own, at the same addresses (`huge_pages`; `PreparedModel` decides).
Not a model format: a file serves this machine's variant and these very source files, and can be deleted any time.

    file      header, zeros up to a multiple of _ALIGNMENT, then the packed bytes of each weight, each beginning at one,
              then 16 bytes: `packed_check.digest_of` all of it
    header    _MAGIC, then JSON: panel layouts (variant included), the source files with size, times and inode, and
              of each weight its place in them, shape, strides, dtype, and its place here
    name      SHA-256 of the header, .packed

Invariants
    K1  the header follows from the weights asked for, before anything is read: a file is used only if it begins with
        exactly that header and has exactly its size. So nothing of a foreign file is interpreted, and anything that
        changes (a source file, the variant, the layout) is another file.
    K2  only weights whose bytes stand unchanged in a safetensors file (`MappedWeights.origins`) are kept, and those
        that follow from one tensor of a GGUF file (`WidenedWeights.origins`); the others are packed in memory.
    K3  a file appears under its name whole: written under another, synced, renamed. Of two writers the last one
        stays; both wrote the same. A file is never changed, only replaced or deleted: mappings stay good. (One that
        somebody else cuts short while it is mapped ends the process, as with any mapped file.)
    K4  a failure to write (disk full) is one warning; the weights packed so far stay in memory.

The packed bytes themselves are not checked at a start: that would read them all. A thread does it afterwards
(`packed_check`). A source file changed in place without a change of its size and times is not noticed.

Cost: the first start writes as many bytes as the weights have, and syncs them; a later one reads the header and maps.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import torch
import xxhash

from quire.backends import native_module
from quire.model.linear import DTYPE_NAMES, NativeWeight
from quire.model.load_gguf import WidenedWeights
from quire.model.mapped_weights import MappedWeights
from quire.model.packed_check import PackedCheck, digest_of
from quire.new_file import UNFINISHED, NewFile

__all__ = ["KeptWeights"]

_MAGIC = b"quire packed weights 2\n"
_DIGEST_BYTES = 16
_ALIGNMENT = 4096
_SUFFIX = ".packed"
_TOUCHED_AT_ONCE = 16 << 20
_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger("quire")

# What a weight is found again by: address, shape and strides.
_Key = tuple[int, torch.Size, tuple[int, ...]]


class KeptWeights:
    """The file in `folder` of those of `weights`, each [num_outputs, num_inputs], that can be kept.

    A context: inside, `pack` gives each weight's packed form; a file that was missing is there after it.
    """

    def __init__(
        self, folder: Path, mapped: MappedWeights | WidenedWeights, weights: Sequence[torch.Tensor]
    ) -> None:
        self._mapped_weights, self._weights = mapped, list(weights)
        self._offsets: dict[_Key, int] = {}
        self._sizes: dict[int, int] = {}  # of the packed form at each offset
        self._digests: dict[int, bytes] = {}  # of what was written there
        self.check: PackedCheck | None = None
        self._header, self._num_bytes = self._plan()
        self.path = folder / (hashlib.sha256(self._header).hexdigest()[:32] + _SUFFIX)
        self._pages: np.ndarray | None = None  # the mapped file
        self._writer: NewFile | None = None
        self._in_memory: list[tuple[NativeWeight, int]] = []

    def __enter__(self) -> KeptWeights:
        if self._offsets and not self._map():
            self._begin()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._writer is None:
            return
        if kind is not None:
            self._abandon()
        elif self._publish(self._writer) and self._map():
            for weight, offset in self._in_memory:
                weight.move(self._bytes(offset, weight.native.num_bytes))
        self._in_memory.clear()

    @property
    def pages(self) -> np.ndarray | None:
        """The mapped file, uint8; None where nothing is read from one."""
        return self._pages

    @property
    def holds_all(self) -> bool:
        """Whether every one of the weights is read from the file."""
        return self._pages is not None and len(self._offsets) == len(self._weights)

    def pack(self, weight: torch.Tensor) -> NativeWeight:
        """The packed form of `weight`: mapped, or packed now (and written)."""
        offset = self._offsets.get(_key(weight))
        if offset is not None and self._pages is not None:
            num_bytes = cast(Any, native_module()).packed_num_bytes(*weight.shape, DTYPE_NAMES[weight.dtype])
            return NativeWeight.at(weight, self._bytes(offset, num_bytes))
        packed = NativeWeight(weight)
        if offset is not None and self._writer is not None:
            self._write(self._writer, packed, offset)
        return packed

    def _plan(self) -> tuple[bytes, int]:
        """The header, and the size of the file; fills in the weights' places."""
        native = cast(Any, native_module())
        files: dict[tuple[str | tuple[int, ...], ...], int] = {}
        entries: list[list[Any]] = []
        position = 0  # from the end of the header
        origins = self._origins = self._mapped_weights.origins(self._weights)
        for weight, origin in zip(self._weights, origins, strict=True):
            if origin is None:
                continue
            reckoned_by = (origin.reckoned_by,) if origin.reckoned_by else ()
            file = files.setdefault((origin.path, origin.stamp, *reckoned_by), len(files))
            dtype = DTYPE_NAMES[weight.dtype]
            num_bytes = native.packed_num_bytes(*weight.shape, dtype)
            self._offsets[_key(weight)] = position
            entries.append([file, origin.offset, *weight.shape, *weight.stride(), dtype, position, num_bytes])
            position += _round_up(num_bytes)
        layouts = {name: native.panel_layout(name) for name in sorted({entry[6] for entry in entries})}
        text = json.dumps({"layouts": layouts, "files": list(files), "weights": entries}, sort_keys=True)
        header = _MAGIC + text.encode() + b"\n"
        start = _round_up(len(header))
        self._offsets = {key: start + offset for key, offset in self._offsets.items()}
        self._sizes = {start + entry[-2]: entry[-1] for entry in entries}
        return header, start + position + _DIGEST_BYTES

    def _bytes(self, offset: int, num_bytes: int) -> np.ndarray:
        return cast(np.ndarray, self._pages)[offset : offset + num_bytes]

    def _map(self) -> bool:
        """Map the file if it is the one that was planned."""
        try:
            with self.path.open("rb") as file:
                if (
                    os.fstat(file.fileno()).st_size != self._num_bytes
                    or file.read(len(self._header)) != self._header
                ):
                    return False
                pages = mmap.mmap(file.fileno(), self._num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:
            return False
        pages.madvise(mmap.MADV_WILLNEED)
        digest = pages[self._num_bytes - _DIGEST_BYTES :]
        self._pages = np.frombuffer(pages, dtype=np.uint8)  # which keeps the mapping
        Thread(target=_touch, args=(self._pages,), name="quire packed weights", daemon=True).start()
        own = {offset: self._sizes[offset] for offset in self._offsets.values()}
        self.check = PackedCheck(self.path, self._header, self._pages, own, digest)
        return True

    def _begin(self) -> None:
        try:
            _remove_abandoned(self.path.parent)
            self._writer = NewFile(self.path)
            fcntl.flock(self._writer.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._writer.write(self._header)
        except OSError as error:
            self._fail(error)

    def _write(self, writer: NewFile, packed: NativeWeight, offset: int) -> None:
        view = np.ctypeslib.as_array(_pointer(packed.native.address), shape=(packed.native.num_bytes,))
        try:
            writer.write(view.data, offset)
        except OSError as error:
            self._fail(error)
            return
        self._digests[offset] = xxhash.xxh3_128_digest(view.data)
        self._in_memory.append((packed, offset))

    def _publish(self, writer: NewFile) -> bool:
        """Give the file its name; not if a source file changed meanwhile."""
        try:
            os.ftruncate(writer.descriptor, self._num_bytes)  # the last weight's padding
            writer.write(digest_of(self._header, self._digests), self._num_bytes - _DIGEST_BYTES)
            if not self._sources_stand():
                self._abandon()
                return False
            self._writer = None
            writer.publish()
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _sources_stand(self) -> bool:
        for path, stamp in {(origin.path, origin.stamp) for origin in self._origins if origin is not None}:
            status = os.stat(path)
            if (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino) != stamp:
                return False
        return True

    def _fail(self, error: OSError) -> None:
        _log.warning(
            "packed weights are not kept in %s (%s); they stay in memory, the next start packs again",
            self.path.parent,
            error.strerror or error,
        )
        self._abandon()

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None


def _key(weight: torch.Tensor) -> _Key:
    return weight.data_ptr(), weight.shape, weight.stride()


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pointer(address: int) -> Any:

    return ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))


def _touch(pages: np.ndarray) -> None:
    """Has the kernel map all pages, read from the disk if need be, so that the first forward does not wait for each."""
    start, stop = pages.ctypes.data, pages.ctypes.data + pages.size
    for address in range(start, stop, _TOUCHED_AT_ONCE):
        size = min(_TOUCHED_AT_ONCE, stop - address)
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_READ):
            return  # before Linux 5.14: they come as they are read


def _remove_abandoned(folder: Path) -> None:
    """Partial files of processes that ended while they wrote: nobody holds their lock."""
    for path in folder.glob("*" + UNFINISHED):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
