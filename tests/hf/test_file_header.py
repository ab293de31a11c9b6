"""Cache files with a forged header: refused by a LoadError, or loaded as valid."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_case import model_of, quire_cache

from quire.errors import LoadError
from quire.hf import QuireCache
from quire.hf.file_header import BadHeaderError, parse

OPTIONS = {"kv_memory": "1MiB", "piece_size": 4096, "max_length": 256}
NAMES = ("gemma3_text", "falcon_h1", "llama int8")  # windows; states; codes
_FRONT = 48

# What JSON can hold where something else is expected.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 70, 10**4000, 1.5, math.inf, math.nan, "", "int32", "float64",
    "nothing", "Tensor", "\ud800", [], {}, [[]], [1] * 9, {"rows": None},
)  # fmt: skip


@cache
def _saved(name: str) -> bytes:
    import tempfile

    model_name, _, kv_dtype = name.partition(" ")
    model = model_of(model_name)
    filled = quire_cache(model, kv_dtype=kv_dtype or "auto")
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, past_key_values=filled, use_cache=True)
    if kv_dtype:
        filled.formats.set_offset(0, torch.zeros(2, 16))  # as if its keys needed one
    with tempfile.TemporaryDirectory() as folder:
        filled.save(Path(folder) / "cache", model)
        return (Path(folder) / "cache").read_bytes()


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    stop = _FRONT + int.from_bytes(content[8:16], "little")
    return json.loads(content[_FRONT:stop]), content[stop:]


def _with_header(content: bytes, text: bytes, payload: bytes) -> bytes:
    return content[:8] + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text + payload


def _forged(name: str, header: Any) -> bytes:
    """A file of this header, whole in itself: a payload of zeros, of the size and the checksums that it tells."""
    content = _saved(name)
    header, payload = copy.deepcopy(header), _parts(content)[1]
    try:
        stored = parse(json.dumps(header).encode())
        if stored.num_bytes != len(payload) and stored.num_bytes < 1 << 20:
            payload = bytes(stored.num_bytes)
            for entry, layer in zip(header["layers"], stored.layers, strict=True):
                if (rows := layer.rows) is not None:
                    tokens = rows.shape.num_rows * (rows.length - rows.first)
                    entry["rows"]["sha256"] = [
                        hashlib.sha256(bytes(tokens * rows.shape.token_bytes(at))).hexdigest()
                        for at in (0, 1)
                    ]
                    if rows.offset is not None:
                        entry["rows"]["offset"] = hashlib.sha256(
                            bytes(4 * math.prod(rows.offset_shape))
                        ).hexdigest()
                for state, read in zip(entry["states"] or (), layer.states or (), strict=True):
                    for tensor, described in read.tensors.items():
                        state[tensor]["sha256"] = hashlib.sha256(bytes(described.num_bytes)).hexdigest()
    except BadHeaderError:
        pass
    return _with_header(content, json.dumps(header).encode(), payload)


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


def _put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document


def _without(document: Any, path: tuple[Any, ...]) -> Any:
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return document


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_field_holds_is_refused_or_loaded_and_never_another_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, _ = _parts(_saved(name))
    own, path = header["fingerprint"], tmp_path / "cache"
    monkeypatch.setattr("quire.hf.file.fingerprint", lambda model: own)  # which takes a pass over the model
    random_ = random.Random(7)
    changed = [
        _put(header, place, odd)
        for place in _places(header)
        for odd in random_.sample(ODD, 1 + len(place) % 2)
    ]
    changed += [_without(header, place) for place in _places(header) if place]
    refused = 0
    for document in changed:
        loaded = _load(path, name, _forged(name, document))
        if isinstance(loaded, str):
            refused += 1
            assert str(path) in loaded
            assert "expected" in loaded
            assert "got" in loaded
        else:
            assert loaded.get_seq_length() in (0, document["layers"][0]["rows"]["length"])
    assert refused > 0.9 * len(changed)


def _change(*path: Any, to: Any) -> Callable[[Any], Any]:
    return lambda header: _put(header, path, to)


def _as_rows(header: Any, **changes: Any) -> Any:
    header = copy.deepcopy(header)
    for entry in header["layers"]:
        entry["rows"].update(changes)
    return header


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda header: _as_rows(header, num_heads=[1, 1]), "expected heads"),
        (lambda header: _as_rows(header, widths=[8, 8]), "of widths"),
        (lambda header: _as_rows(header, dtype="int32"), "floating point dtype, got 'int32'"),
        (lambda header: _as_rows(header, dtype="float64"), "expected torch.float32, got torch.float64"),
        (lambda header: _as_rows(header, first=3), "expected the tokens from 2 on, got those from 3"),
        (lambda header: _as_rows(header, num_rows=1 << 50), "integer of 1 to 1048576"),
        (_change("layers", 1, "rows", "num_rows", to=1), "expected 2 rows of 9 tokens in every layer, got 1"),
        (_change("layers", 1, "rows", "length", to=8), "expected 2 rows of 9 tokens in every layer"),
        (_change("layers", 1, "rows", to=None), "in every layer, got none in layers"),
        (_change("layers", 0, "states", to=[]), "expected no states, got 0"),
        (_change("layers", to=[]), "expected 3 layers, got 0"),
        (_change("fingerprint", "weights", to="x"), "expected a SHA-256 in hex, got 'x'"),
    ],
)
def test_a_forged_header_whose_checksums_are_right_is_refused(
    change: Callable[[Any], Any], told: str, tmp_path: Path
) -> None:
    header, _ = _parts(_saved("gemma3_text"))
    answer = _load(tmp_path / "cache", "gemma3_text", _forged("gemma3_text", change(header)))
    assert isinstance(answer, str)
    assert told in answer
    assert "the file is not used" in answer


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_change("kv_dtype", to="int3"), "stored as 'int3'"),
        (
            _change("kv_dtype", to="auto"),
            "expected keys and values in the model's dtype, got ('int8', 'int8')",
        ),
        (
            _change("layers", 1, "rows", "formats", to=["int8", "int3"]),
            "expected formats of codes, got 'int3'",
        ),
        (
            _change("layers", 1, "rows", "formats", to=["int8", ""]),
            "expected keys and values in ('int8', 'int8')",
        ),
        (lambda header: _as_rows(header, num_heads=[1, 1]), "expected heads"),
        (lambda header: _as_rows(header, num_heads=[2, 1]), "expected as many heads of V as of K"),
        (lambda header: _as_rows(header, foretold=False, widths=[8, 8]), "of widths"),
        (lambda header: _as_rows(header, formats=["", ""]), "expected an offset only for keys in codes"),
    ],
)
def test_forged_codes_whose_checksums_are_right_are_refused(
    change: Callable[[Any], Any], told: str, tmp_path: Path
) -> None:
    name = "llama int8"
    answer = _load(tmp_path / "cache", name, _forged(name, change(_parts(_saved(name))[0])))
    assert isinstance(answer, str)
    assert told in answer
    assert "the file is not used" in answer


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_change("layers", 1, "states", 0, "conv_states", "shape", 0, to=1), "expected states of 2 rows, got 1"),
        (_change("layers", 1, "states", 0, "recurrent_states", "shape", 0, to=3), "expected states of 2 rows, got 3"),
        (_change("layers", 0, "states", 0, "conv_states", "shape", 1, to=7), "channels for each row, got 7"),
        (_change("layers", 0, "states", 0, "recurrent_states", "shape", 1, to=1), "recurrent numbers for each row"),
        (_change("layers", 0, "states", 0, "conv_kernel_size", to=3), "whose last size is conv_kernel_size"),
        (_change("layers", 0, "states", 0, "conv_kernel_size", to=None), "whose last size is conv_kernel_size"),
        (_change("layers", 0, "states", 0, "has_previous_state", to=False), "has_previous_state true, got false"),
        (
            _change("layers", 0, "states", 0, to={"has_previous_state": False, "conv_kernel_size": None,
                                                  "conv_states": None, "recurrent_states": None}),
            "expected states in every state layer, got none in layers[0]",
        ),
    ],
)  # fmt: skip
def test_forged_states_whose_checksums_are_right_are_refused(
    change: Callable[[Any], Any], told: str, tmp_path: Path
) -> None:
    header, _ = _parts(_saved("falcon_h1"))
    answer = _load(tmp_path / "cache", "falcon_h1", _forged("falcon_h1", change(header)))
    assert isinstance(answer, str)
    assert told in answer
    assert "the file is not used" in answer


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"null", b"7", b"[1]", b"\xff\xfe", b"[" * 200_000, b'{"layers": 1' + b"0" * 5000 + b"}"],
)
def test_a_header_that_is_no_json_of_ours_is_refused(text: bytes, tmp_path: Path) -> None:
    answer = _load(tmp_path / "cache", "gemma3_text", _with_header(_saved("gemma3_text"), text, b""))
    assert isinstance(answer, str)
    assert "expected" in answer


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
        model(torch.full((2, 5), 7), past_key_values=filled, use_cache=True)
    filled.crop(-5)
    filled.save(tmp_path / "cache", model)
    loaded = QuireCache.load(tmp_path / "cache", model, **OPTIONS)
    assert loaded.get_seq_length() == 0
    with torch.no_grad():
        got, want = (
            model(torch.full((2, 5), 9), past_key_values=one, use_cache=True).logits
            for one in (loaded, filled)
        )
    assert torch.equal(got, want)
