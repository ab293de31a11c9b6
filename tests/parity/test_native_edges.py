"""The bindings with wrong arguments: an exception, never the end of the process; and objects that keep their referents
alive."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import native_fuzz as fuzz

_native = pytest.importorskip("quire._native")

FUZZ = Path(fuzz.__file__)


def test_wrong_arguments_raise_and_never_end_the_process(tmp_path: Path) -> None:
    seed, num_calls = os.environ.get("FUZZ_SEED", "1"), os.environ.get("FUZZ_CALLS", "60")
    log = tmp_path / "call"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(FUZZ), seed, num_calls],
        env={**os.environ, "FUZZ_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    last = log.read_text().splitlines()[0].strip() if log.exists() else "before the first call"
    assert done.returncode == 0, f"ended with {done.returncode} in {last}\n{done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    assert found["without_a_recipe"] == [], "name a valid call in tests/support/native_fuzz.py"
    assert set(found["calls"].values()) == {int(num_calls)}


# Who has to live, and the native object that refers to it.


def kept_tensors() -> list[tuple[str, Any, list[torch.Tensor]]]:
    one, two = torch.ones(16), torch.zeros(16)
    pool, rows = torch.zeros(2, 2, 4, 8), [torch.tensor(v, dtype=torch.int32) for v in ([0, 1], [1], [[0]])]
    return [
        ("PagedView", _native.PagedView(pool[:1], pool[1:]), []),
        ("AttentionBatch", _native.AttentionBatch(*rows, 1), rows),
        ("AttentionOptions", _native.AttentionOptions(1.0, 0, 0, 0.0, one, two), [one, two]),
        ("Norm", _native.Norm("layer", one, two, 1e-5), [one, two]),
        (
            "MlpBlock",
            _native.MlpBlock(fuzz.around(), [(fuzz.weight(), one)], False, "relu", fuzz.weight(), two),
            [one, two],
        ),
        (
            "AttentionBlock",
            _native.AttentionBlock(
                fuzz.around(), [(fuzz.weight(), one)], None, None, True, "none", fuzz.weight(), two, 1
            ),
            [one, two],
        ),
    ]


@pytest.mark.parametrize("at", range(6))
def test_tensors_live_as_long_as_what_refers_to_them(at: int) -> None:
    name, native, tensors = kept_tensors()[at]
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert all(ref() is not None for ref in alive), name
    del native
    gc.collect()
    assert not any(ref() is not None for ref in alive), name


def test_a_view_reads_its_storage_when_nobody_else_has_it() -> None:
    view = _native.PagedView(torch.full((1, 1, 4, 8), 3.0), torch.full((1, 1, 4, 8), 5.0))
    scraps = [torch.full((1, 1, 4, 8), 9.0) for _ in range(64)]  # what would take the freed memory
    batch = _native.AttentionBatch(
        *(torch.tensor(values, dtype=torch.int32) for values in ([0, 1], [4], [[0]])), 1
    )
    out = torch.zeros(1, 1, 8)
    _native.attention_run(
        view, torch.ones(1, 1, 8), out, batch, _native.AttentionOptions(1.0, 0, 0, 0.0, None)
    )
    assert torch.equal(out, torch.full((1, 1, 8), 5.0))
    assert len(scraps) == 64


def test_blocks_and_decoders_keep_their_parts() -> None:
    decoder = _native.Decoder(*fuzz.decoder_arguments())  # of which nobody else has any
    scraps = [fuzz.weight() for _ in range(8)]
    positions, logits = torch.tensor([0, 1, 4]), torch.zeros(1, 20)
    arguments = (
        [fuzz.batch()],
        [fuzz.slots()],
        torch.tensor([1, 2, 3]),
        None,
        positions,
        fuzz.angles(5),
        fuzz.angles(5),
    )
    decoder.run(*arguments, torch.tensor([2]), logits)
    first = logits.clone()
    decoder.run(*arguments, torch.tensor([2]), logits)
    assert torch.equal(logits, first)
    assert logits.isfinite().all()
    assert len(scraps) == 8


def test_packed_bytes_may_not_be_resized_under_a_weight() -> None:
    memory = bytearray(_native.packed_num_bytes(16, 16, "float32") + 64)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % 64
    packed = _native.PackedWeight.at(
        memoryview(memory)[start : start + len(memory) - 64], 16, 16, "float32", None
    )
    with pytest.raises(BufferError):
        memory.clear()
    del packed
    gc.collect()
    memory.clear()


# What was seen to go wrong.


@pytest.mark.parametrize("call", ["reserve", "num_blocks_needed"])
def test_arrays_of_two_lengths_are_refused(call: str) -> None:
    manager = fuzz.manager()
    with pytest.raises(ValueError, match="expected sequences and num_new_tokens of one length, got 2 and 1"):
        getattr(manager, call)(np.array([0, 1]), np.array([1]), 0)
    with pytest.raises(ValueError, match="expected sequences and tokens of one length, got 1 and 0"):
        manager.advance(np.array([0]), np.array([10]), np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="expected as many key positions as keys, got 0 and 1"):
        manager.match(fuzz.tokens(), b"", fuzz.NO_POSITIONS, [b"key"])
    with pytest.raises(ValueError, match="expected key positions that rise, below the number of tokens, 10"):
        manager.match(fuzz.tokens(), b"", np.array([10]), [b"key"])
    manager.check()


def test_sizes_that_a_manager_cannot_count_are_refused() -> None:
    good = [[("full", 0)], 16, 4, True, 0, False, 1]
    for at, value in [
        (0, []), (0, [("window", 0)]), (0, [("chunked", -1)]), (1, -1), (1, 2**31), (2, 0), (2, 8192),
        (4, -1), (6, 0), (6, 3), (6, 2**16),
    ]:  # fmt: skip
        bad = list(good)
        bad[at] = value
        with pytest.raises(ValueError, match="expected"):
            _native.BlockManager(*bad)
    manager = _native.BlockManager(*good)
    for lookahead in (-1, 2**31, 2**62):
        with pytest.raises(ValueError, match="expected num_lookahead of 0 to"):
            manager.reserve(np.zeros(0, np.int64), np.zeros(0, np.int64), lookahead)
    with pytest.raises(ValueError, match="expected cache_priority of 0 to 2, got 3"):
        manager.open(fuzz.tokens(), b"", fuzz.NO_POSITIONS, [], 0, 3)


def test_heads_of_no_width_and_short_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a head's width of 1 to"):
        _native.PagedView(torch.zeros(1, 1, 4, 0), torch.zeros(1, 1, 4, 8))
    with pytest.raises(ValueError, match="expected query heads in a multiple of the 2 heads"):
        fuzz.batch().traffic(fuzz.view(), 1, fuzz.options())
    weight, rows = fuzz.weight(), fuzz.rows()
    with pytest.raises(
        ValueError, match=r"expected out as contiguous float32 of 48 elements, got float32 \[2, 16\]"
    ):
        weight.multiply(rows, None, rows[:2])
    with pytest.raises(ValueError, match="expected bias as contiguous float32, got float64"):
        weight.multiply(rows, torch.zeros(16, dtype=torch.float64), rows)
    with pytest.raises(TypeError, match="expected x as a torch tensor or a buffer, got int"):
        weight.multiply(7, None, rows)
    with pytest.raises(ValueError, match="expected x with its memory"):
        weight.multiply(fuzz.freed(), None, torch.zeros(8, 16))
    with pytest.raises(ValueError, match="in this machine's memory"):
        weight.multiply(torch.empty(3, 16, device="meta"), None, rows)
    with pytest.raises(ValueError, match="expected pieces within a payload of 64 bytes"):
        _native.copy_rows(np.zeros(64, np.uint8), np.array([[60, 1 << 20, 1, 8, 8]]), False)
