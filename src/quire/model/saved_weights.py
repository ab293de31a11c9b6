"""Packed weights of a model, kept in a file from one start to the next and mapped: 16-bit panels, and panels of codes.

A start that finds its file packs nothing, rounds nothing, reads no dense weight and allocates no memory for one: the
kernels read the mapped file, whose pages all processes share and the kernel may take back under pressure. Where memory
is ample they are then moved to huge pages of the process's own, at the same addresses (`huge_pages`; `PreparedModel`
decides).
Not a model format: a file serves this machine's variant and these very source files, and can be deleted any time.
What is kept, and as what, is said by whoever packs: `saved_linears` and `saved_codes`, each with a file of its own.

    file      header, zeros up to a multiple of _ALIGNMENT, then the packed bytes of each weight, each beginning at one,
              then JSON: what of each weight its bytes do not say (`metadata`; null: it is not there); then 16
              bytes twice: XXH3-128 of that JSON, and `saved_check.digest_of` all of it
    header    _MAGIC, then JSON: the layouts (variant included), the source files with size, times and inode, and of
              each weight its places in them, how it is made of what stands there (`WeightToSave.made`), and its
              place here
    name      SHA-256 of the header, .packed

Invariants
    K1  the header follows from the weights asked for, before anything is read: a file is used only if it begins with
        exactly that header, has exactly its size, and what is told of its weights is what was written. So nothing of a
        foreign file is interpreted, and anything that changes (a source file, the variant, the layout, the rounding)
        is another file.
    K2  only weights are kept of which it is certain from which bytes of which files they follow
    (`WeightToSave.origins`); the
        others are packed in memory.
    K3  a file appears under its name whole: written under another, synced, renamed. Of two writers the last one
        stays; both wrote the same. A file is never changed, only replaced or deleted: mappings stay good. (One that
        somebody else cuts short while it is mapped ends the process, as with any mapped file.)
    K4  a failure to write (disk full) is one warning; the weights packed so far stay in memory.

Whose the folder is, how large it gets and which files go first: `quire.saved_folder`.

The packed bytes themselves are not checked at a start: that would read them all. A thread does it afterwards
(`saved_check`). A source file changed in place without a change of its size and times is not noticed.

Cost: the first start writes as many bytes as the weights have, and syncs them; a later one reads the header and maps.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, BinaryIO, Protocol, Self, TypeVar, cast

import numpy as np
import xxhash

from quire.atomic_file import AtomicFile
from quire.memory.free_memory import count_as_taken
from quire.model.file_ranges import FileRange
from quire.model.saved_check import SavedCheck, digest_of
from quire.saved_folder import SavedFolder

__all__ = ["PackedData", "SavedWeights", "WeightToSave"]

_MAGIC = b"quire packed weights 3\n"
_DIGEST_BYTES = 16
_ALIGNMENT = 4096
_SUFFIX = ".packed"
_TOUCHED_AT_ONCE = 16 << 20
_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger("quire")


class PackedData(Protocol):
    """A packed weight: `NativeWeight` or `QuantizedPanels`."""

    native: Any
    """The extension's form: `address` and `num_bytes`."""

    @property
    def metadata(self) -> Any:
        """JSON, not null: what is needed beside its bytes to read them again."""
        ...

    def move(self, packed: np.ndarray) -> None:
        """Read these bytes, the same, from now on. Before anybody has taken `native`."""
        ...


_AnyPacked = TypeVar("_AnyPacked", bound=PackedData)


@dataclass(frozen=True)
class WeightToSave:
    """A packed weight that may be kept.

    key: what it is found by. origins: the bytes of files that it follows from, in order; none: it is not kept. made:
    how it follows from them, JSON. layout: the name of its packed form, and a text that changes when the form does.
    num_bytes: of the packed form.
    """

    key: Hashable
    origins: tuple[FileRange, ...]
    made: tuple[int | str, ...]
    layout: tuple[str, str]
    num_bytes: int


class SavedWeights:
    """The file in `folder` of those of `wanted` that can be kept.

    A context: inside, `take` gives each weight's packed form; a file that was missing is there after it.
    """

    def __init__(self, folder: SavedFolder, wanted: Sequence[WeightToSave]) -> None:
        self._num_in_memory = 0  # of the weights taken, those that are not read from the file
        self._offsets: dict[Hashable, int] = {}
        self._sizes: dict[int, int] = {}  # of the packed form at each offset
        self._digests: dict[int, bytes] = {}  # of what was written there
        self._told: dict[int, Any] = {}  # of the weight there
        self._sources: set[tuple[str, tuple[int, ...]]] = set()
        self.check: SavedCheck | None = None
        self._header, self._end = self._plan([one for one in wanted if one.origins])
        self._folder = folder
        self.path = folder.path / (hashlib.sha256(self._header).hexdigest()[:32] + _SUFFIX)
        self._pages: np.ndarray | None = None  # the mapped file
        self._writer: AtomicFile | None = None
        self._in_memory: list[tuple[PackedData, int]] = []

    def __enter__(self) -> Self:
        if self.is_kept and not self._map():
            self._begin()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._writer is None:
            return
        if kind is not None:
            self._abandon()
        elif self._publish(self._writer) and self._map():
            for weight, offset in self._in_memory:
                weight.move(self._bytes(offset))
            self._num_in_memory -= len(self._in_memory)
        self._in_memory.clear()

    @property
    def pages(self) -> np.ndarray | None:
        """The mapped file, uint8; None where nothing is read from one."""
        return self._pages

    @property
    def is_kept(self) -> bool:
        """Whether there is a file of so many bytes to read or to write."""
        return bool(self._offsets) and self._folder.keeps(self._end)

    @property
    def holds_all(self) -> bool:
        """Whether every weight that was taken, if any was, is read from the file."""
        return self._num_in_memory == 0

    def can_save(self, key: Hashable) -> bool:
        """Whether it is certain from which files the weight follows."""
        return key in self._offsets

    def take(
        self, key: Hashable, make: Callable[[], _AnyPacked], at: Callable[[np.ndarray, Any], _AnyPacked]
    ) -> _AnyPacked:
        """The weight `key`: mapped, which `at` makes of its bytes and of what was told of it, or made (and written)."""
        offset = self._offsets.get(key)
        if offset is not None and self._pages is not None:
            return at(self._bytes(offset), self._told[offset])
        packed = make()
        self._num_in_memory += 1
        if offset is not None and self._writer is not None:
            self._write(self._writer, packed, offset)
        return packed

    def _plan(self, wanted: Sequence[WeightToSave]) -> tuple[bytes, int]:
        """The header, and where the weights end; fills in their places."""
        files: dict[tuple[str | tuple[int, ...], ...], int] = {}
        entries: list[list[Any]] = []
        position = 0  # from the end of the header
        for one in wanted:
            places: list[list[int]] = []
            for origin in one.origins:
                dequantizer_versions = (origin.dequantizer_versions,) if origin.dequantizer_versions else ()
                file = files.setdefault((origin.path, origin.stamp, *dequantizer_versions), len(files))
                places.append([file, origin.offset])
                self._sources.add((origin.path, origin.stamp))
            self._offsets[one.key] = position
            entries.append([places, *one.made, one.layout[0], position, one.num_bytes])
            position += _round_up(one.num_bytes)
        layouts = dict(one.layout for one in wanted)
        text = json.dumps({"layouts": layouts, "files": list(files), "weights": entries}, sort_keys=True)
        header = _MAGIC + text.encode() + b"\n"
        start = _round_up(len(header))
        self._offsets = {key: start + offset for key, offset in self._offsets.items()}
        self._sizes = {start + entry[-2]: entry[-1] for entry in entries}
        return header, start + position

    def _bytes(self, offset: int) -> np.ndarray:
        return cast(np.ndarray, self._pages)[offset : offset + self._sizes[offset]]

    def _map(self) -> bool:
        """Map the file if it is the one that was planned."""
        try:
            with self._folder.open(self.path) as file:
                if file.read(len(self._header)) != self._header or (end := self._read_end(file)) is None:
                    return False
                told, digest, num_bytes = end
                pages = mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:
            return False
        pages.madvise(mmap.MADV_WILLNEED)
        self._pages = np.frombuffer(pages, dtype=np.uint8)  # which keeps the mapping
        count_as_taken(self._pages)
        Thread(target=_touch, args=(self._pages,), name="quire packed weights", daemon=True).start()
        self._told = dict(zip(self._offsets.values(), json.loads(told), strict=True))
        self._offsets = {
            key: offset for key, offset in self._offsets.items() if self._told[offset] is not None
        }
        own = {offset: self._sizes[offset] for offset in self._offsets.values()}
        self.check = SavedCheck(self.path, self._header + told, self._pages, own, digest)
        return True

    def _read_end(self, file: BinaryIO) -> tuple[bytes, bytes, int] | None:
        """What is told of the weights, the digest of all, and the size of the file; None of another file."""
        file.seek(self._end)
        end = file.read()
        told, own, of_all = (
            end[: -2 * _DIGEST_BYTES],
            end[-2 * _DIGEST_BYTES : -_DIGEST_BYTES],
            end[-_DIGEST_BYTES:],
        )
        return (told, of_all, self._end + len(end)) if own == xxhash.xxh3_128_digest(told) else None

    def _begin(self) -> None:
        try:
            self._folder.make_room(self._end)
            self._writer = AtomicFile(self.path)
            fcntl.flock(self._writer.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._writer.descriptor, self._end)  # other processes see what it will take
            self._writer.write(self._header)
        except OSError as error:
            self._fail(error)

    def _write(self, writer: AtomicFile, packed: PackedData, offset: int) -> None:
        if packed.native.num_bytes != self._sizes[offset]:
            _log.warning(
                "expected %d bytes of a packed weight as its file's header tells, got %d: it is not kept",
                self._sizes[offset],
                packed.native.num_bytes,
            )
            return
        view = np.ctypeslib.as_array(_pointer(packed.native.address), shape=(packed.native.num_bytes,))
        try:
            writer.write(view.data, offset)
        except OSError as error:
            self._fail(error)
            return
        self._digests[offset] = xxhash.xxh3_128_digest(view.data)
        self._told[offset] = packed.metadata
        self._in_memory.append((packed, offset))

    def _publish(self, writer: AtomicFile) -> bool:
        """Give the file its name; not if a source file changed meanwhile."""
        told = json.dumps([self._told.get(offset) for offset in self._offsets.values()]).encode()
        try:
            os.ftruncate(writer.descriptor, self._end)  # the last weight's padding
            of_all = digest_of(self._header + told, self._digests)
            writer.write(told + xxhash.xxh3_128_digest(told) + of_all, self._end)
            if not self._sources_stand():
                self._abandon()
                return False
            self._writer = None
            writer.publish()
            self._folder.written(self.path)
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _sources_stand(self) -> bool:
        for path, stamp in self._sources:
            status = os.stat(path)
            if (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino) != stamp:
                return False
        return True

    def _fail(self, error: OSError) -> None:
        self._folder.tell("packed weights are", error)
        self._abandon()

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None


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
