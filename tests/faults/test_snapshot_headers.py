"""Snapshots with a forged header and right checksums: LoadError, or the content of the header, no other result."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from quire.errors import LoadError
from quire.sessions.snapshot_files import SnapshotFiles, SnapshotRecord

GOOD = SnapshotRecord("talk", "tiny", b"f" * 32, np.arange(20, dtype=np.int32), {3: b"image"}, 1.0, b"whose")
ODD: tuple[Any, ...] = (
    None, True, -1, 19, 1 << 70, 10**4000, 1.5, math.inf, math.nan, "", "zz", "../x", [], {}, [[]], [[3, 7]],
    [[3, "zz"]], [["3", "00"]], [[-1, "00"]], [[20, "00"]], [[3.0, "00"]], [[[], "00"]], [3],
)  # fmt: skip


def _written(folder: Path) -> tuple[SnapshotFiles, Path, dict[str, Any], bytes]:
    files = SnapshotFiles(folder)
    files.write(GOOD, b"", overwrite=True)
    (path,) = folder.glob("quire-cache.snapshot-*")
    content = path.read_bytes()
    stop = 32 + int.from_bytes(content[12:16], "little")
    return files, path, json.loads(content[32:stop]), content[stop:]


def _forged(text: bytes, tokens: bytes, length: int | None = None) -> bytes:
    numbers = (1).to_bytes(4, "little") + (len(text) if length is None else length).to_bytes(4, "little")
    return b"QUIRESNP" + numbers + xxhash.xxh3_128_digest(numbers + text + tokens) + text + tokens


def test_whatever_a_field_holds_is_refused_or_read_and_never_another_error(tmp_path: Path) -> None:
    files, path, header, tokens = _written(tmp_path)
    assert _forged(json.dumps(header, sort_keys=True).encode(), tokens) == path.read_bytes()
    refused = 0
    documents: list[Any] = [
        *ODD,
        *({name: header[name] for name in header if name != gone} for gone in header),
    ]
    for name in header:
        documents += [{**copy.deepcopy(header), name: odd} for odd in ODD]
    for document in documents:
        path.write_bytes(_forged(json.dumps(document).encode(), tokens))
        try:
            found = files.read("talk", b"")
        except LoadError as error:
            refused += str(path) in str(error)
        else:
            assert found.token_ids.tolist() == GOOD.token_ids.tolist()
            assert all(0 <= position < 20 for position in found.extra_keys)
            assert math.isfinite(found.made_at)
    assert refused > 0.85 * len(documents)


@pytest.mark.parametrize(
    ("text", "tokens", "length"),
    [
        (b"", b"", None), (b"{", b"", None), (b"[" * 100_000, b"", None), (b"\xff", b"", None), (b"{}", b"", 1 << 31),
        (None, b"", None), (None, bytes(79), None), (None, bytes(84), None), (None, b"\xff" * 80, None),
    ],
)  # fmt: skip
def test_a_header_or_tokens_of_another_form_are_refused(
    text: bytes | None, tokens: bytes, length: int | None, tmp_path: Path
) -> None:
    files, path, header, _ = _written(tmp_path)
    path.write_bytes(_forged(json.dumps(header).encode() if text is None else text, tokens, length))
    with pytest.raises(LoadError, match="expected a snapshot, got"):
        files.read("talk", b"")
