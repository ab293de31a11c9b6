"""Every exception Quire raises on purpose.

    QuireError
    ├── ArgumentError (also ValueError)   an argument is wrong; nothing was changed
    │   ├── ConfigError                   a model's config cannot be understood
    │   ├── PromptError                   an empty prompt, a token id out of range, too long a prompt
    │   └── SequenceClosedError           a sequence was used after it was closed
    ├── CapacityError                     the request can never fit in this cache, with the numbers
    ├── UnsupportedModelError             the model cannot be run exactly, with its type and the reason
    ├── LoadError                         a model folder, a weights file or a tokenizer cannot be read
    ├── BackendError                      the native extension is requested and not available, or the like
    ├── CancelledError                    the request was aborted by its owner
    ├── DeviceLostError                   a card failed, and only a new process can use it again
    ├── OtherProcessError                 a child of os.fork used an object of its parent process
    └── InvariantError                    `check()` found a broken invariant: a bug in Quire

Messages have one grammar: expected, got, where, what to do, with numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = [
    "ArgumentError",
    "BackendError",
    "CancelledError",
    "CapacityError",
    "ConfigError",
    "DeviceLostError",
    "InvariantError",
    "LoadError",
    "OtherProcessError",
    "PromptError",
    "QuireError",
    "SequenceClosedError",
    "UnsupportedModelError",
    "with_flag_names",
]


class QuireError(Exception):
    """Root of all of Quire's own exceptions."""


class ArgumentError(QuireError, ValueError):
    """An argument is out of its range or of the wrong form; nothing was changed."""


class ConfigError(ArgumentError):
    """A model's config lacks a field or has one that Quire cannot interpret."""


class PromptError(ArgumentError):
    """A prompt that cannot be served: empty, a token id out of range, longer than the model allows."""


class PromptTooLongError(PromptError):
    """A prompt with more tokens than the longest sequence; the message has both numbers."""


class SequenceClosedError(ArgumentError):
    """A sequence was used after `Cache.close`."""


class CapacityError(QuireError):
    """A request that can never fit, however long it waits; the message has the numbers."""


class UnsupportedModelError(QuireError):
    """A model whose attention Quire cannot run exactly; it is refused, never answered wrongly."""


class LoadError(QuireError):
    """A model folder, weights file or tokenizer that cannot be read."""


class BackendError(QuireError):
    """A back end that is not available here."""


class CancelledError(QuireError):
    """The request was aborted by its owner."""


class OtherProcessError(QuireError):
    """An object was used in a fork of the process that made it, where it cannot be used."""


class DeviceLostError(QuireError):
    """A card has failed, and every further call of it fails: only a new process can use it again."""


class InvariantError(QuireError):
    """An invariant does not hold: a bug in Quire, reported with the numbers."""


def with_flag_names(message: str, flags: Mapping[str, str]) -> str:
    """A message with the flags of the command line for its options' names. flags: by option's name.

    A final "- in `name`" keeps the name where it has other characters than the flag; elsewhere names with an underscore
    are replaced, which are no words of a sentence.
    """

    def place(match: re.Match[str]) -> str:
        name = match[2]
        if name not in flags:
            return match[0]
        return f"{match[1]}{flags[name]}" + (f" (`{name}`)" if flags[name] != f"--{name}" else "")

    parts = re.split(r"( - (?:in|as) `[a-z_]+`)", message)
    names = "|".join(sorted((name for name in flags if "_" in name), key=len, reverse=True))
    for at, part in enumerate(parts):
        if at % 2:
            parts[at] = re.sub(r"( - (?:in|as) )`([a-z_]+)`", place, part)
        elif names:
            parts[at] = re.sub(
                rf"(?<![\w'\"`/.=-])({names})(?![\w'\"`/.=-])", lambda match: flags[match[1]], part
            )
    return "".join(parts)
