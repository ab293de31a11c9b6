"""The fake driver of CUDA (`fake_cuda.c`): loads it in place of libcuda.so.1, and asks it.

    driver = fake_driver(page_bytes=4096)     # empty, or skips the test
    driver.fail(3); ...; assert driver.num_failed == 1

cuda-bindings opens libcuda.so.1 at its first call; the loader gives it the library of that name that is in the process
already. A process with a real driver has no fake one.

Cost: a second to compile, at the first call on a machine; the library lies in the temporary folder by its source's
hash.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

__all__ = ["OUT_OF_MEMORY", "UNKNOWN", "FakeDriver", "fake_driver"]

OUT_OF_MEMORY, UNKNOWN = 2, 999
_SOURCE = Path(__file__).with_name("fake_cuda.c")


@functools.cache
def _library() -> Any:
    pytest.importorskip("cuda.bindings.driver")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"quire-fake-cuda-{os.getuid()}-{digest}"
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        new = folder / f"{os.getpid()}.so"
        flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([compiler, *flags, "-o", str(new), str(_SOURCE)], check=True)
        new.replace(library)
    if "libcuda.so" in Path("/proc/self/maps").read_text() and "quire-fake-cuda" not in _loaded():
        pytest.skip("this process has a real driver")
    loaded: Any = ctypes.CDLL(str(library))
    for name, result, arguments in (
        ("fake_reset", None, [ctypes.c_size_t, ctypes.c_size_t]),
        ("fake_fail", None, [ctypes.c_long, ctypes.c_long]),
        ("fake_run", None, [ctypes.c_uint64, ctypes.c_size_t]),
        ("fake_fault", ctypes.c_char_p, []),
        ("fake_handle_at", ctypes.c_long, [ctypes.c_uint64]),
        (
            "fake_mapped",
            ctypes.c_long,
            [ctypes.c_uint64, ctypes.c_size_t, *[ctypes.c_void_p] * 2, ctypes.c_long],
        ),
        ("fake_calls", ctypes.c_long, [ctypes.c_char_p]),
    ):
        getattr(loaded, name).restype, getattr(loaded, name).argtypes = result, arguments
    for name in ("failed", "mappings", "ranges", "handles", "events", "bytes_taken"):
        getattr(loaded, f"fake_{name}").restype = ctypes.c_long
    return loaded


def _loaded() -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return " ".join(line for line in lines if "libcuda.so" in line)


def fake_driver(page_bytes: int = 2 << 20, total_bytes: int = 256 << 20) -> FakeDriver:
    """The fake driver without handles, ranges, counts or faults; memory of an earlier test must not be touched."""
    return FakeDriver(_library(), page_bytes, total_bytes)


class FakeDriver:
    """The counts of the fake driver, and the faults that a test asks of it. Sizes in bytes."""

    def __init__(self, library: Any, page_bytes: int, total_bytes: int) -> None:
        self._library = library
        self.page_bytes, self.total_bytes = page_bytes, total_bytes
        library.fake_reset(page_bytes, total_bytes)

    def fail(self, at: int, code: int = OUT_OF_MEMORY) -> None:
        """Have the `at`-th call from now on that takes or changes memory fail, without effect; 0 for none."""
        self._library.fake_fail(at, code)

    @property
    def num_failed(self) -> int:
        return self._library.fake_failed()

    def run(self, address: int, num_bytes: int) -> None:
        """Have a kernel use these addresses until a later event is waited for, or `finish`."""
        self._library.fake_run(address, num_bytes)

    def finish(self) -> None:
        """End the kernel."""
        self._library.fake_finish()

    @property
    def fault(self) -> str:
        """The first misuse that a card answers with an illegal access; empty if there was none."""
        return self._library.fake_fault().decode()

    @property
    def num_mappings(self) -> int:
        return self._library.fake_mappings()

    @property
    def num_ranges(self) -> int:
        return self._library.fake_ranges()

    @property
    def num_handles(self) -> int:
        """Handles that were created and not released."""
        return self._library.fake_handles()

    @property
    def bytes_taken(self) -> int:
        """Memory of the card in use."""
        return self._library.fake_bytes_taken()

    def handle_at(self, address: int) -> int:
        """The handle mapped there, 0 for none; negative if access is not allowed."""
        return self._library.fake_handle_at(address)

    def mapped(self, address: int, num_bytes: int) -> dict[int, int]:
        """Handle by address of each mapping in a range."""
        addresses, handles = (ctypes.c_uint64 * 65536)(), (ctypes.c_uint64 * 65536)()
        found = self._library.fake_mapped(address, num_bytes, addresses, handles, 65536)
        return dict(zip(addresses[:found], handles[:found], strict=True))

    def calls(self, name: str) -> int:
        """How often cuda-bindings made a call."""
        return self._library.fake_calls(name.encode())

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Handles, mappings, ranges and bytes taken."""
        return self.num_handles, self.num_mappings, self.num_ranges, self.bytes_taken
