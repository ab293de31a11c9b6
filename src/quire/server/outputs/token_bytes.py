"""The bytes that a token stands for in a text. One token may be part of a character, and then has no text of its own.

Known are the decoders of byte-level vocabularies and of those that fall back to bytes; of any other, a token's bytes
are those of its text as it is decoded alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from quire.server.outputs.markers import added_tokens

__all__ = ["shown", "token_bytes"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Those of a token, of a special one its name's."""
    return _reader(tokenizer)(token)


def shown(data: bytes, prefix: str = "") -> str:
    """The text of bytes; of those that are none as OpenAI writes them: the prefix and `\\xe2\\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


@functools.lru_cache(maxsize=16)
def _reader(tokenizer: Any) -> Callable[[int], bytes]:
    added = {token: text.encode() for text, token in added_tokens(tokenizer).items()}
    kinds = _decoder_kinds(tokenizer)
    piece: Callable[[str], bytes] | None = None
    if "ByteLevel" in kinds:
        piece = _of_byte_level
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        piece = _of_sentence_piece

    def read(token: int) -> bytes:
        if token in added:
            return added[token]
        if piece is not None and (name := tokenizer.convert_ids_to_tokens(token)) is not None:
            return piece(name)
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.encode("utf-8", "replace")

    return read


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """The names of the steps by which the tokenizers library makes text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {state["type"], *(step["type"] for step in state.get("decoders", ()))}


def _of_byte_level(name: str) -> bytes:
    table = _byte_of_symbol()
    return b"".join(bytes([table[one]]) if one in table else one.encode("utf-8", "replace") for one in name)


@functools.cache
def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _of_sentence_piece(name: str) -> bytes:
    if found := _BYTE.fullmatch(name):
        return bytes([int(found[1], 16)])
    return name.replace("\u2581", " ").encode("utf-8", "replace")
