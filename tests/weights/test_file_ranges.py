"""Weights in a mapped file leave the process's memory once packed, and keep their bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.weights.file_ranges import MappedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


def resident_kib(address: int) -> int:
    """Resident memory of the mapping that holds `address`."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, _, stop = first.partition("-")
            found = int(start, 16) <= address < int(stop, 16)
        elif found and first == "Rss:":
            return int(line.split()[1])
    raise AssertionError(f"no mapping holds {address:#x}")


def test_a_mapped_weight_is_given_back_and_reads_the_same(tmp_path: Path) -> None:
    weights = {name: torch.randn(700, 1003) for name in ("a", "b", "c")}
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    before = resident_kib(loaded["b"].data_ptr())
    mapped = MappedFiles()
    mapped.release(loaded["b"])
    given_back = before - resident_kib(loaded["b"].data_ptr())
    assert given_back >= 700 * 1003 * 4 // 1024 - 8  # the pages it shares with its neighbours stay
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_memory_that_is_no_file_is_left_alone() -> None:
    weight = torch.randn(700, 1003)
    copy = weight.clone()
    MappedFiles().release(weight)
    assert torch.equal(weight, copy)
    assert torch.equal(weight.T, copy.T)
