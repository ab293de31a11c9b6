"""Packed weights of a model, saved in a file from one start to the next and mapped: 16-bit panels, and panels of codes.

A start that finds its file packs and rounds no weight, reads no dense weight and allocates no memory for one: the
kernels read the mapped file, whose pages all processes share and the kernel may reclaim under pressure. If memory is
ample, the pages are then moved to huge pages of the process's own, at the same addresses (`huge_pages`; `PreparedModel`
decides). Not a model format: a file serves this machine's variant and these very source files, and can be deleted any
time. The makers of packed weights decide which to save, and in what layout: `saved_linears` and `saved_codes`, each
with a file of its own.

    file      header, zeros up to a multiple of _ALIGNMENT, then the packed bytes of each weight, each beginning at a
              multiple, then JSON: the metadata of each weight (`PackedData.metadata`; null: the weight is missing);
              then 16 bytes twice: XXH3-128 of that JSON, and `saved_check.file_digest` of the whole file
    header    _MAGIC, then JSON: the layouts (variant included), the source files with size, times and inode, and for
              each weight its places in them, the settings of its making (`WeightToSave.settings`), and its place here
    name      SHA-256 of the header, .packed

Invariants
    K1  the header follows from the requested weights, before anything is read: a file is used only if it begins with
        exactly that header, has exactly its size, and the checksum of its metadata matches. So no content of a
        foreign file is interpreted, and any change (a source file, the variant, the layout, the rounding) leads to
        another file.
    K2  only weights are saved whose file ranges are certain (`WeightToSave.origins`); the others are packed in memory.
    K3  a file appears under its name complete: written under another name, synced, renamed. Of two writers the last
        stays; both wrote the same. A file is never changed, only replaced or deleted: mappings stay valid. (If another
        program truncates a mapped file, the process ends, as with any mapping.)
    K4  a failure to write (disk full) is one warning; the weights packed so far stay in memory.

Not here: the folder's owner, its size limit and the order of deletion (`quire.saved_folder`).

The packed bytes are not checked at a start, which would read them all; a thread checks them afterwards (`saved_check`).
A source file changed in place without a change of its size and times is not noticed.

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
from quire.saved_folder import SavedFolder
from quire.weights.file_ranges import FileRange
from quire.weights.saved_check import SavedCheck, file_digest

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
        """JSON, not null: what reading the weight needs in addition to its bytes."""
        ...

    def move(self, packed: np.ndarray) -> None:
        """Read these bytes, the same, from now on. To be called before any caller has taken `native`."""
        ...


_AnyPacked = TypeVar("_AnyPacked", bound=PackedData)


@dataclass(frozen=True)
class WeightToSave:
    """A packed weight that may be saved.

    key: identifies it. origins: its file ranges, in order; empty: it is not saved. settings: of its making from them,
    JSON. layout: the name of its packed form, and a text that changes when the form does. num_bytes: of the packed
    form.
    """

    key: Hashable
    origins: tuple[FileRange, ...]
    settings: tuple[int | str, ...]
    layout: tuple[str, str]
    num_bytes: int


class SavedWeights:
    """The file in `folder` of the `weights` that can be saved.

    A context: within it `load_or_make` returns each weight's packed form; a missing file exists after it.
    """

    def __init__(self, folder: SavedFolder, weights: Sequence[WeightToSave]) -> None:
        self._num_in_memory = 0  # returned weights that are not read from the file
        self._offsets: dict[Hashable, int] = {}
        self._sizes: dict[int, int] = {}  # of the packed form at each offset
        self._digests: dict[int, bytes] = {}  # of the written weight at each offset
        self._metadata: dict[int, Any] = {}  # of the weight at each offset
        self._sources: set[tuple[str, tuple[int, ...]]] = set()
        self.check: SavedCheck | None = None
        self._header, self._end = self._plan([weight for weight in weights if weight.origins])
        self._folder = folder
        self.path = folder.path / (hashlib.sha256(self._header).hexdigest()[:32] + _SUFFIX)
        self._pages: np.ndarray | None = None  # the mapped file
        self._writer: AtomicFile | None = None
        self._in_memory: list[tuple[PackedData, int]] = []

    def __enter__(self) -> Self:
        if self.has_file and not self._map():
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
        """The mapped file, uint8; None if no file is mapped."""
        return self._pages

    @property
    def has_file(self) -> bool:
        """Whether there are weights for a file, large enough for the folder."""
        return bool(self._offsets) and self._folder.is_worth_saving(self._end)

    @property
    def holds_all(self) -> bool:
        """Whether every weight that was returned, if any was, is read from the file."""
        return self._num_in_memory == 0

    def load_or_make(
        self, key: Hashable, make: Callable[[], _AnyPacked], at: Callable[[np.ndarray, Any], _AnyPacked]
    ) -> _AnyPacked:
        """The weight `key`: mapped, made by `at` of its bytes and metadata, or made by `make` (and saved)."""
        offset = self._offsets.get(key)
        if offset is not None and self._pages is not None:
            return at(self._bytes(offset), self._metadata[offset])
        packed = make()
        self._num_in_memory += 1
        if offset is not None and self._writer is not None:
            self._write(self._writer, packed, offset)
        return packed

    def _plan(self, weights: Sequence[WeightToSave]) -> tuple[bytes, int]:
        """The header, and the end offset of the weights; sets their offsets."""
        files: dict[tuple[str | tuple[int, ...], ...], int] = {}
        entries: list[list[Any]] = []
        position = 0  # from the end of the header
        for weight in weights:
            places: list[list[int]] = []
            for origin in weight.origins:
                reader_versions = (origin.reader_versions,) if origin.reader_versions else ()
                file = files.setdefault((origin.path, origin.stamp, *reader_versions), len(files))
                places.append([file, origin.offset])
                self._sources.add((origin.path, origin.stamp))
            self._offsets[weight.key] = position
            entries.append([places, *weight.settings, weight.layout[0], position, weight.num_bytes])
            position += _round_up(weight.num_bytes)
        layouts = dict(weight.layout for weight in weights)
        text = json.dumps({"layouts": layouts, "files": list(files), "weights": entries}, sort_keys=True)
        header = _MAGIC + text.encode() + b"\n"
        start = _round_up(len(header))
        self._offsets = {key: start + offset for key, offset in self._offsets.items()}
        self._sizes = {start + entry[-2]: entry[-1] for entry in entries}
        return header, start + position

    def _bytes(self, offset: int) -> np.ndarray:
        return cast(np.ndarray, self._pages)[offset : offset + self._sizes[offset]]

    def _map(self) -> bool:
        """Map the file if it has the planned header."""
        try:
            with self._folder.open(self.path) as file:
                if file.read(len(self._header)) != self._header or (end := self._read_end(file)) is None:
                    return False
                metadata, digest, num_bytes = end
                pages = mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:
            return False
        pages.madvise(mmap.MADV_WILLNEED)
        self._pages = np.frombuffer(pages, dtype=np.uint8)  # which keeps the mapping
        count_as_taken(self._pages)
        Thread(target=_touch, args=(self._pages,), name="quire packed weights", daemon=True).start()
        self._metadata = dict(zip(self._offsets.values(), json.loads(metadata), strict=True))
        self._offsets = {
            key: offset for key, offset in self._offsets.items() if self._metadata[offset] is not None
        }
        sizes = {offset: self._sizes[offset] for offset in self._offsets.values()}
        self.check = SavedCheck(self.path, self._header + metadata, self._pages, sizes, digest)
        return True

    def _read_end(self, file: BinaryIO) -> tuple[bytes, bytes, int] | None:
        """The metadata of the weights, the digest of the file, and its size; None for another file."""
        file.seek(self._end)
        end = file.read()
        metadata, checksum, digest = (
            end[: -2 * _DIGEST_BYTES],
            end[-2 * _DIGEST_BYTES : -_DIGEST_BYTES],
            end[-_DIGEST_BYTES:],
        )
        return (
            (metadata, digest, self._end + len(end)) if checksum == xxhash.xxh3_128_digest(metadata) else None
        )

    def _begin(self) -> None:
        try:
            self._folder.make_room(self._end)
            self._writer = AtomicFile(self.path)
            fcntl.flock(self._writer.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._writer.descriptor, self._end)  # shows other processes its final size
            self._writer.write(self._header)
        except OSError as error:
            self._fail(error)

    def _write(self, writer: AtomicFile, packed: PackedData, offset: int) -> None:
        if packed.native.num_bytes != self._sizes[offset]:
            _log.warning(
                "expected %d bytes of a packed weight by its file's header, got %d: it is not saved",
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
        self._metadata[offset] = packed.metadata
        self._in_memory.append((packed, offset))

    def _publish(self, writer: AtomicFile) -> bool:
        """Give the file its name, unless a source file has changed since."""
        metadata = json.dumps([self._metadata.get(offset) for offset in self._offsets.values()]).encode()
        try:
            os.ftruncate(writer.descriptor, self._end)  # the last weight's padding
            digest = file_digest(self._header + metadata, self._digests)
            writer.write(metadata + xxhash.xxh3_128_digest(metadata) + digest, self._end)
            if not self._sources_stand():
                self._abandon()
                return False
            self._writer = None
            writer.publish()
            self._folder.add_saved(self.path)
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
        self._folder.warn_not_saved("packed weights are", error)
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
    """Have the kernel map all pages, reading from the disk if needed, so that the first forward does not wait for
    each."""
    start, stop = pages.ctypes.data, pages.ctypes.data + pages.size
    for address in range(start, stop, _TOUCHED_AT_ONCE):
        size = min(_TOUCHED_AT_ONCE, stop - address)
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_READ):
            return  # before Linux 5.14: reads map the pages
