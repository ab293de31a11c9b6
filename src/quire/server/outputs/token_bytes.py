"""The bytes of a token. A token may be a part of a character, and then has no text of its own.

The decoders of byte-level vocabularies and of vocabularies with byte fallback are known; with other decoders, a
token's bytes are those of its text when it is decoded alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from quire.server.outputs.markers import added_tokens

__all__ = ["text_of_bytes", "token_bytes"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token; a special token's are those of its name."""
    return _reader(tokenizer)(token)


def text_of_bytes(data: bytes, prefix: str = "") -> str:
    """The text of bytes; of bytes that are not UTF-8, as OpenAI writes them: the prefix and `\\xe2\\x82`."""
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
        piece = _byte_level_bytes
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        piece = _sentence_piece_bytes

    def read(token: int) -> bytes:
        if token in added:
            return added[token]
        if piece is not None and (name := tokenizer.convert_ids_to_tokens(token)) is not None:
            return piece(name)
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.encode("utf-8", "replace")

    return read


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """The types of the tokenizers library's decoding steps."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {state["type"], *(step["type"] for step in state.get("decoders", ()))}


def _byte_level_bytes(name: str) -> bytes:
    table = _byte_of_symbol()
    return b"".join(
        bytes([table[char]]) if char in table else char.encode("utf-8", "replace") for char in name
    )


@functools.cache
def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _sentence_piece_bytes(name: str) -> bytes:
    if match := _BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    return name.replace("\u2581", " ").encode("utf-8", "replace")
