"""The machine line: the first line every benchmark prints, so that no figure travels without its machine.

JSON lines on stdout: `emit_machine()` once, then `emit(...)` per figure. Needs the standard library only; torch and
transformers are named if they are installed, without being imported.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib import metadata
from typing import Any

__all__ = ["emit", "emit_machine", "machine"]

_ISA_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
)


def _cpu_info() -> tuple[str, list[str]]:
    """Model name and the instruction sets that matter here, in the order of `_ISA_FLAGS`."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() in ("flags", "Features"):
                    flags = set(value.split())
    except OSError:
        pass  # not Linux: the name alone
    return name, [flag for flag in _ISA_FLAGS if flag in flags]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The machine of the figures below it."""
    cpu, isa = _cpu_info()
    return {
        "machine": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": isa,
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "quire": _version("quire-kv"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def emit(benchmark: str, **figures: Any) -> None:
    """Prints one figure as a JSON line."""
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


def emit_machine() -> None:
    """Prints the machine line; call it once, first."""
    print(json.dumps(machine()), flush=True)


if __name__ == "__main__":
    emit_machine()
