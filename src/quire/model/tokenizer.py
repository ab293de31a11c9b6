"""A tokenizer's memory: told from its files before it is loaded, and what of it goes once it is loaded.

The library `tokenizers` holds a vocabulary as hash tables: each word twice, by text and by id, and each merge once.
Their slots are a power of two, so that what they take follows from two counts. `transformers` holds what it made them
of as Python objects too, word by word and merge by merge: `release_copies` lets go of that.

Not here: the loading of a tokenizer (`load`, `load_gguf`), encoding.

Cost: `release_copies` some ms; `tokenizer_size` a pass over tokenizer.json, about 0.1 s for each 10 MB.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CodeType
from typing import Any

from quire.memory.heap import give_back_freed

__all__ = ["release_copies"]

# What a class of transformers makes its backend of and leaves as an attribute: two thirds of a tokenizer's memory.
_COPIES = ("_vocab", "_merges", "_vocab_scores")


def release_copies(tokenizer: Any) -> None:
    """Let go of the Python objects that a fast tokenizer's vocabulary was made of, where no method reads them."""
    if not getattr(tokenizer, "is_fast", False):
        return
    used = set(_names_in_methods(type(tokenizer)))
    held = [name for name in _COPIES if name in vars(tokenizer) and name not in used]
    for name in held:
        delattr(tokenizer, name)
    if held:
        # Added tokens were made last and lie between what went: moved together, they keep no memory around them.
        tokenizer.init_kwargs = copy.deepcopy(tokenizer.init_kwargs)
    give_back_freed()


def _names_in_methods(kind: type) -> Iterator[str]:
    """Attributes that the methods of a class and its bases read, their constructors left out."""
    for base in kind.__mro__:
        for name, member in vars(base).items():
            parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
            for part in parts:
                code = getattr(getattr(part, "__func__", part), "__code__", None)
                if name != "__init__" and isinstance(code, CodeType):
                    yield from _names_in(code)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
