"""The fake card: a device of torch in this process whose memory the host cannot touch; `card.cpp` has how it works.

    card()                      # builds the library once a machine, loads it once a process, or skips the test
    torch.ones(3, device="card:0")
    with counted() as counts: ...
    assert counts.to_host == 1

A tensor of another device beside one of the card is refused with CUDA's words, and an access of the host to a card's
address is a segmentation fault, whose traceback names the line. Unwritten and freed memory there is NaN.

Cost: 6 s to compile, at the first call on a machine; the library lies in the user's cache folder by its content's hash.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

__all__ = ["CARD", "CopyCounts", "card", "counted", "limited_memory", "lost_card"]

CARD = torch.device("privateuseone:0")  # "card:0" once the library is loaded
_SOURCE = Path(__file__).with_suffix(".cpp")


@dataclass
class CopyCounts:
    """Copies between the host and the card, and the calls in which the host waited for the card.

    races: copies to the card whose pinned bytes the host changed before it waited. launches: operators on the card.
    """

    to_card: int = 0
    to_card_bytes: int = 0
    to_host: int = 0
    to_host_bytes: int = 0
    waits: int = 0
    races: int = 0
    launches: int = 0


class CardBuildError(Exception):
    """The library cannot be built here."""


def card() -> torch.device:
    """The fake card as a device of torch, "card:0"; skips the test where it cannot be built."""
    try:
        _library()
    except CardBuildError as error:
        pytest.skip(f"no fake card: {error}")
    return torch.device("card:0")


@contextmanager
def counted() -> Iterator[CopyCounts]:
    """Counts of the block, final at its end."""
    before, result = _counts(), CopyCounts()
    try:
        yield result
    finally:
        for field, start, stop in zip(fields(CopyCounts), before, _counts(), strict=True):
            setattr(result, field.name, stop - start)


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """The card has `num_bytes` in all."""
    library = _library()
    before = library.card_total_bytes()
    library.card_set_total_bytes(num_bytes)
    try:
        yield
    finally:
        library.card_set_total_bytes(before)


@contextmanager
def lost_card() -> Iterator[None]:
    """Every call of the card fails but those that free memory, as after an error in a kernel of CUDA."""
    _library().card_set_lost(1)
    try:
        yield
    finally:
        _library().card_set_lost(0)


def _counts() -> list[int]:
    values = (ctypes.c_int64 * len(fields(CopyCounts)))()
    _library().card_read_counts(values)
    return list(values)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_built()))
    library.card_used_bytes.restype = library.card_total_bytes.restype = ctypes.c_int64
    library.card_set_total_bytes.argtypes = [ctypes.c_int64]
    torch.utils.rename_privateuse1_backend("card")
    torch._register_device_module("card", _device_module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return library


def _built() -> Path:
    """The compiled library, from the user's cache folder or made there."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or sys.platform != "linux":
        raise CardBuildError("it needs Linux and a C++ compiler (g++, or the one that CXX names)")
    root = Path(torch.__file__).parent
    identity = f"{torch.__version__} {platform.machine()} {compiler}".encode()
    name = hashlib.sha256(identity + _SOURCE.read_bytes()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache"
    folder = Path(base) / "quire" / "fake-card"
    library = folder / f"{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        part = library.with_suffix(".part")
        abi = int(torch.compiled_with_cxx11_abi())
        command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        command += ["-isystem", str(root / "include"), str(_SOURCE), "-o", str(part)]
        command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CardBuildError(f"{compiler} refuses card.cpp: {done.stderr[:2000]}")
        part.rename(library)
    return library


def _wait(library: ctypes.CDLL) -> None:
    if library.card_wait():
        raise RuntimeError("card error: an illegal memory access was encountered")


def _device_module(library: ctypes.CDLL) -> ModuleType:
    """`torch.card`, with the names of `torch.cuda` that a user of one card calls."""
    module: Any = ModuleType("torch.card")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: nullcontext()
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device="card": torch.get_rng_state()
    module.set_rng_state = lambda state, device="card": torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.empty_cache = lambda: None
    module.synchronize = lambda device=None: _wait(library)
    module.memory_allocated = module.memory_reserved = lambda device=None: library.card_used_bytes()
    module.mem_get_info = lambda device=None: (
        library.card_total_bytes() - library.card_used_bytes(),
        library.card_total_bytes(),
    )
    module.get_device_name = lambda device=None: "fake card"
    module.Stream = lambda device=None, **options: torch.Stream(device="card:0", **options)
    module.Event = lambda **options: torch.Event(device="card:0", **options)
    module.current_stream = lambda device=None: torch.accelerator.current_stream("card:0")
    module.default_stream = lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=20)
    module.stream = lambda stream: nullcontext() if stream is None else stream
    return module
