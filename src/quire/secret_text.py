"""Reads keys and other secrets from files and environment variables, as any editor or shell may have written them.

An editor may have put a byte order mark, UTF-16, CRLF or spaces around a key, which clients do not send. Reading strips
them; a key that no client could send (with a character beyond ASCII, or a control character) is refused at once, not as
a wrong key later. Messages never contain a secret.

Cost: a read of the file.
"""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path

from quire.errors import ArgumentError

__all__ = [
    "check_key",
    "is_readable_by_all",
    "key_lines",
    "key_of_environment",
    "read_text",
    "resolve_secret",
]

_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_INVISIBLE = "\ufeff\u200b\0"  # stripped from around a key, in addition to white space


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8, or in UTF-16 with a byte order mark; without the mark. *raises:* OSError;
    ValueError."""
    data = Path(path).read_bytes()
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _decoded(data.removeprefix(mark), encoding)
    return _decoded(data, "utf-8")


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:  # whose own text contains bytes of the file
        raise ValueError(
            f"byte {error.start} is not {encoding[:6].upper()}; save it as UTF-8, or as UTF-16 with a byte order mark"
        ) from None


def key_lines(path: str | os.PathLike[str]) -> list[str]:
    """The keys of a file, one per line; blank lines and lines that begin with # are skipped.

    *raises:* ArgumentError: it cannot be read, has no key, or one that no client can send.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"expected a readable file of API keys, got {path}: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        text = _bare(line)
        if text and not text.startswith("#"):
            keys.append(check_key(text, f"line {number} of {path}"))
    if not keys:
        raise ArgumentError(f"expected at least one API key, got none - in {path}")
    return keys


def check_key(text: str, where: str) -> str:
    """A key, stripped of invisible characters around it. *raises:* ArgumentError: no client can send it."""
    key = _bare(text)
    if not key:
        raise ArgumentError(f"expected an API key, got an empty one - in {where}")
    odd = next((c for c in key if not (c.isascii() and c.isprintable())), None)
    if odd is not None:
        raise ArgumentError(
            f"expected a key of printable ASCII characters, which clients can send, got one with the "
            f"character U+{ord(odd):04X} - in {where}"
        )
    return key


def resolve_secret(text: str, where: str) -> str:
    """The secret in a file's entry or a flag: literal text, or `env:NAME`, the value of a variable, stripped of
    invisible characters around it. *raises:* ArgumentError: the variable is not set, or empty."""
    kind, _, name = text.partition(":")
    if kind != "env":
        return text
    value = _bare(os.environ.get(name, ""))
    if not value:
        raise ArgumentError(f"expected a secret in the environment variable {name}, got none - in {where}")
    if not value.isprintable():  # a surrogate, of bytes that are not UTF-8, is not printable either
        raise ArgumentError(
            f"expected printable text in the environment variable {name}, got other characters - in {where}"
        )
    return value


def key_of_environment(name: str) -> str | None:
    """The key in a variable; None if it is not set, or empty. *raises:* ArgumentError: no client can send it."""
    value = os.environ.get(name, "")
    return check_key(value, f"the environment variable {name}") if _bare(value) else None


def is_readable_by_all(path: str | os.PathLike[str]) -> bool:
    """Whether every user of this machine may read a file."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & stat.S_IROTH)


def _bare(text: str) -> str:
    before = None
    while text != before:
        before, text = text, text.strip().strip(_INVISIBLE)
    return text
