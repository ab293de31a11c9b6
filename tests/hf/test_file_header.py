"""Cache files with a forged header, whose digests are right: refused by a LoadError, or loaded as valid."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_argument import CACHE
from support.hf_case import model_of, quire_cache

from quire.errors import LoadError
from quire.hf import QuireCache

OPTIONS = {"kv_memory": "1MiB", "piece_size": 4096, "max_length": 256}
NAMES = ("gemma3_text", "falcon_h1", "llama int8")  # windows; states; codes
_ZEROS = "0" * 64
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "I8": 1, "I32": 4}

# What JSON can hold where something else is expected.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 70, 10**4000, 1.5, math.inf, math.nan, "", "I32", "F64",
    "nothing", "\ud800", [], {}, [[]], [1] * 9, {"rows": None},
)  # fmt: skip


@cache
def _saved(name: str) -> bytes:
    model_name, _, kv_dtype = name.partition(" ")
    model = model_of(model_name)
    filled = quire_cache(model, kv_dtype=kv_dtype or "auto")
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, **{CACHE: filled}, use_cache=True)
    if kv_dtype:
        filled.formats.set_offset(0, torch.zeros(2, 16))  # as if its keys needed one
    with tempfile.TemporaryDirectory() as folder:
        filled.save(Path(folder) / "cache", model)
        return (Path(folder) / "cache").read_bytes()


def _header_of(name: str) -> dict[str, Any]:
    """The header of a saved cache: its description, decoded, and the dtype and shape of each tensor."""
    content = _saved(name)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return {
        "quire_cache": json.loads(header.pop("__metadata__")["quire_cache"]),
        **{key: {"dtype": entry["dtype"], "shape": entry["shape"]} for key, entry in header.items()},
    }


def _file_of(text: str, data: bytes = b"") -> bytes:
    """A file of this header, in which zeros stand for the header's digest."""
    front = len(text.encode()).to_bytes(8, "little") + text.encode()
    return front.replace(_ZEROS.encode(), hashlib.sha256(front).hexdigest().encode(), 1) + data


def _forged(header: Any) -> bytes:
    """A file of this header (as of `_header_of`), whole in itself: data of zeros, of the size that it tells."""
    document, end = {}, 0
    for key, entry in (header if isinstance(header, dict) else {}).items():
        if key != "quire_cache":
            document[key], begin = entry, end
            if isinstance(entry, dict) and "data_offsets" not in entry:
                try:
                    end += _BYTES[entry["dtype"]] * math.prod(entry["shape"])
                except (KeyError, TypeError):
                    end += 4
                document[key] = {**entry, "data_offsets": [begin, end]}
    data = bytes(end) if isinstance(end, int) and 0 <= end < 1 << 20 else b""
    metadata = {"header_sha256": _ZEROS, "data_sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(header, dict) and "quire_cache" in header:
        metadata["quire_cache"] = json.dumps(header["quire_cache"])
    return _file_of(json.dumps({"__metadata__": metadata, **document}, separators=(",", ":")), data)


def _load(path: Path, name: str, content: bytes) -> QuireCache | str:
    path.write_bytes(content)
    try:
        return QuireCache.load(path, model_of(name.partition(" ")[0]), **OPTIONS)
    except LoadError as error:
        return str(error)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _places(value[key], (*path, key))


def _put(header: Any, path: tuple[Any, ...], value: Any) -> Any:
    """value: `_put` itself takes the place away."""
    if not path:
        return value
    header = copy.deepcopy(header)
    inner = header
    for key in path[:-1]:
        inner = inner[key]
    if value is _put:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return header


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_field_holds_is_refused_or_loaded_and_never_another_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, path = _header_of(name), tmp_path / "cache"
    own = header["quire_cache"]["fingerprint"]
    monkeypatch.setattr("quire.hf.file.fingerprint", lambda model: own)  # which takes a pass over the model
    assert isinstance(_load(path, name, _forged(header)), QuireCache)
    random_ = random.Random(7)
    values = [(place, odd) for place in _places(header) for odd in random_.sample(ODD, 1 + len(place) % 2)]
    values += [(place, _put) for place in _places(header) if place]
    values += [((key, "data_offsets"), odd) for key in list(header)[1:] for odd in (*ODD, [0, 1 << 70])]
    refused = 0
    for place, value in values:
        document = _put(header, place, value)
        loaded = _load(path, name, _forged(document))
        if isinstance(loaded, str):
            refused += 1
            assert str(path) in loaded
            assert "expected" in loaded
            assert "got" in loaded
        else:
            assert loaded.get_seq_length() == document["quire_cache"]["num_tokens"]
    assert refused > 0.9 * len(values)


K, V, CACHE_KEY = ("layers.1.k", "shape"), ("layers.1.v", "shape"), "quire_cache"
Changes = list[tuple[tuple[Any, ...], Any]]


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("gemma3_text", [((*K, 2), 1), ((*V, 2), 1)], "expected heads (2, 2) of widths (16, 16), got (1, 1)"),
        ("gemma3_text", [((*K, 3), 8)], "expected heads (2, 2) of widths (16, 16), got (2, 2) of (8, 16)"),
        ("gemma3_text", [(("layers.0.k", "dtype"), "I32")], "expected torch.float32, got torch.int32"),
        ("gemma3_text", [(("layers.0.k", "dtype"), "F64")], "expected torch.float32, got torch.float64"),
        ("gemma3_text", [(("layers.0.v", "dtype"), "F64")], "got float64 [2, 7, 2, 16] - in layers.0.v"),
        ("gemma3_text", [(("layers.0.k", "shape", 1), 6), (("layers.0.v", "shape", 1), 6)], "7 to 9 tokens, got 6"),
        ("gemma3_text", [((*K, 0), 1 << 21), ((*V, 0), 1 << 21), ((*K, 1), 0), ((*V, 1), 0)], "1 to 1048576 rows"),
        ("gemma3_text", [((*K, 0), 1), ((*V, 0), 1)], "expected 2 rows in every layer, got 1 - in layers.1.k"),
        ("gemma3_text", [((*V, 0), 1)], "expected k and v [rows, tokens, heads, width]"),
        ("gemma3_text", [(("layers.1.k",), _put), (("layers.1.v",), _put)], "got none in layers [1]"),
        ("gemma3_text", [(("layers.1.v",), _put)], "got others: 'layers.1.k'"),
        ("gemma3_text", [(("layers.3.k",), {"dtype": "F32", "shape": [2, 9, 2, 16]})], "got others: 'layers.3.k'"),
        ("gemma3_text", [(("layers.0.conv_states.0",), {"dtype": "F32", "shape": [2, 9, 2]})], "got others"),
        ("gemma3_text", [((CACHE_KEY, "fingerprint", "weights"), "x")], "got 'x' - in '__metadata__.quire_cache"),
        ("gemma3_text", [((CACHE_KEY, "fingerprint", "behaviour"), _put)], "another state of its modules"),
        ("gemma3_text", [((CACHE_KEY, "format"), 2)], "got 2 - in '__metadata__.quire_cache.format'"),
        ("gemma3_text", [((CACHE_KEY, "num_tokens"), 5)], "tokens, got 7 - in layers.0"),
        ("llama int8", [((CACHE_KEY, "kv_dtype"), "int3")], "stored as 'int3'"),
        ("llama int8", [((CACHE_KEY, "kv_dtype"), "auto")], "expected torch.float32, got torch.int8"),
        ("llama int8", [((CACHE_KEY, "kv_dtype"), "int4")], "expected uint8 [2, 9, 2, 8], got int8"),
        ("llama int8", [((*K, 2), 1)], "expected int8 [2, 9, 2, 16], got int8 [2, 9, 1, 16] - in layers.1.k"),
        ("llama int8", [((CACHE_KEY, "own_shapes"), [1]), ((*V, 3), 8)], "got int8 [2, 9, 2, 8] - in layers.1.v"),
        ("llama int8", [(("layers.1.v_scale",), _put)], "[2, 9, 2], got none - in layers.1.v_scale"),
        ("llama int8", [((CACHE_KEY, "coded_dtypes", "1"), _put)], "got none of layers.1"),
        ("llama int8", [(("layers.0.k_offset", "shape", 0), 1)], "expected float32 [2, 16], got float32 [1, 16]"),
        ("falcon_h1", [(("layers.1.conv_states.0", "shape", 0), 1)], "expected 2 rows in every layer, got 1"),
        ("falcon_h1", [(("layers.1.recurrent_states.0", "shape", 0), 3)], "expected 2 rows in every layer, got 3"),
        ("falcon_h1", [(("layers.0.conv_states.0", "shape", 1), 7)], "conv_states for each row, got 7"),
        ("falcon_h1", [(("layers.0.recurrent_states.0", "shape", 1), 1)], "recurrent_states for each row"),
        ("falcon_h1", [(("layers.0.recurrent_states.0", "dtype"), "F64")], "numbers of at most 4 bytes"),
        (
            "falcon_h1",
            [(("layers.0.conv_states.0",), _put), (("layers.0.recurrent_states.0",), _put)],
            "expected states in every state layer, got none in layers.0",
        ),
    ],
)  # fmt: skip
def test_a_forged_header_whose_digests_are_right_is_refused(
    name: str, changes: Changes, told: str, tmp_path: Path
) -> None:
    header = _header_of(name)
    for place, value in changes:
        header = _put(header, place, value)
    answer = _load(tmp_path / "cache", name, _forged(header))
    assert isinstance(answer, str)
    assert told in answer
    assert "the file is not used" in answer


@pytest.mark.parametrize(
    "text", ["", '"}', '"}}', '","data_sha256":' + "[" * 200_000, '","data_sha256":1' + "0" * 5000 + "}}"]
)
def test_a_header_that_is_no_json_of_ours_is_refused(text: str, tmp_path: Path) -> None:
    content = _file_of('{"__metadata__":{"header_sha256":"' + _ZEROS + text)
    answer = _load(tmp_path / "cache", "gemma3_text", content)
    assert isinstance(answer, str)
    assert "expected the header of a saved cache" in answer


def test_bytes_changed_cut_off_or_added_anywhere_are_refused(tmp_path: Path) -> None:
    good, random_ = _saved("gemma3_text"), random.Random(11)
    for _ in range(25):
        at, some = random_.randrange(len(good)), random_.randbytes(random_.randrange(1, 9))
        for content in (
            good[:at],
            good[:at] + some + good[at:],
            good + some,
            good[:at] + some + good[at + len(some) :],
        ):
            loaded = _load(tmp_path / "cache", "gemma3_text", content)
            assert isinstance(loaded, str) or content == good


def test_a_cache_cropped_to_nothing_comes_back(tmp_path: Path) -> None:
    model = model_of("gemma3_text")
    filled = quire_cache(model)
    with torch.no_grad():
        model(torch.full((2, 5), 7), **{CACHE: filled}, use_cache=True)
    filled.crop(-5)
    filled.save(tmp_path / "cache", model)
    loaded = QuireCache.load(tmp_path / "cache", model, **OPTIONS)
    assert loaded.get_seq_length() == 0
    with torch.no_grad():
        got, want = (
            model(torch.full((2, 5), 9), **{CACHE: one}, use_cache=True).logits for one in (loaded, filled)
        )
    assert torch.equal(got, want)
