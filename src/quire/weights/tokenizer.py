"""A tokenizer's memory: predicted from its file before it is loaded, and reduced once it is loaded.

The library `tokenizers` stores a vocabulary in hash tables: each word twice, by its text and by its id, each merge
once, and for a model of kind Unigram a trie of word prefixes. The number of slots is a power of two, of which 7 of 8
are used; so the memory follows from the counts. `transformers` stores its input to the library as Python objects too,
word by word and merge by merge, twice as much again: `release_copies` drops those.

Not here: the loading of a tokenizer (`load`, `load_gguf`), encoding.

Cost: `count_words` reads the file, 0.1 s for each 10 MB; `release_copies` some ms.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from transformers.utils.hub import cached_file

from quire.memory.heap import give_back_freed
from quire.weights.sources import GGUFSource

__all__ = [
    "TOKENIZER_FILES",
    "Vocabulary",
    "count_words",
    "gguf_vocabulary",
    "planned_vocabulary",
    "release_copies",
]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder with a tokenizer has at least one of them."""

# The attributes that a class of transformers builds its backend from, and leaves in place.
_COPIES = ("_vocab", "_merges", "_vocab_scores")

_WORD_SLOT, _MERGE_SLOT = 33, 17  # bytes: text and id, and a byte of the hash; two ids for two
_TEXT = 32  # the C library's smallest allocation, with 24 bytes of text
_SCORED_WORD = 32  # of Unigram's list: text and score
# Of Unigram's trie; measured on words of Gemma and Qwen, 32 000 to 250 000 of them.
_NODE, _NODES_A_WORD = 272, 2.3
# Measured: freed memory that reading leaves between live memory. A file of JSON leaves twice as much as a GGUF file.
_LEFT_A_WORD, _LEFT_A_WORD_OF_GGUF, _LEFT_A_MERGE = 50, 25, 8
_MERGES_A_WORD = 2  # if the merges follow from words' scores: 1.96 in Gemma, 1.91 in Llama 2
_ADDED = 1200  # measured: in the automaton that finds added tokens, by id, by text, and as a Python object


_BEFORE_LIST, _IN_PAIRS = re.compile(rb"\s*:\s*(?=[\[{])"), re.compile(rb"\[\s*\[")


@dataclass(frozen=True)
class Vocabulary:
    """The counts that decide a tokenizer's memory.

    num_words, num_merges, num_added: added tokens come in addition to the model's words, or take precedence over them.
    is_unigram: words have scores and no merges. is_counted: by its file; else estimated from the model's config.
    of_gguf: whether it is a GGUF file's.
    """

    num_words: int
    num_merges: int = 0
    num_added: int = 0
    is_unigram: bool = False
    is_counted: bool = True
    of_gguf: bool = False

    @property
    def table_bytes(self) -> int:
        """The bytes of the library's tables and texts."""
        slots = _num_slots(self.num_words)
        num_bytes = slots * _WORD_SLOT + 2 * self.num_words * _TEXT
        if self.is_unigram:
            num_bytes += self.num_words * _SCORED_WORD + int(self.num_words * _NODES_A_WORD) * _NODE
        else:
            num_bytes += slots * _WORD_SLOT
        return num_bytes + _num_slots(self.num_merges) * _MERGE_SLOT

    @property
    def num_bytes(self) -> int:
        """The bytes of the process once the tokenizer is loaded."""
        left = _LEFT_A_WORD_OF_GGUF if self.of_gguf else _LEFT_A_WORD
        left_bytes = self.num_words * left + self.num_merges * _LEFT_A_MERGE
        return self.table_bytes + self.num_added * _ADDED + left_bytes

    @property
    def label(self) -> str:
        """The counts as text."""
        merges = f", {self.num_merges} merges" * bool(self.num_merges)
        return f"{'' if self.is_counted else 'about, '}{self.num_words} words{merges}"


def planned_vocabulary(where: str, revision: str | None, vocab_size: int) -> Vocabulary | None:
    """The vocabulary of a folder, or of a Hub id in the local cache; None without a tokenizer."""

    def cached_path(name: str) -> Path | None:
        options = {
            "revision": revision,
            "local_files_only": True,
            "_raise_exceptions_for_missing_entries": False,
        }
        path = cached_file(where, name, _raise_exceptions_for_connection_errors=False, **options)
        return None if path is None else Path(path)

    path = cached_path(TOKENIZER_FILES[0])
    if path is not None and (vocabulary := count_words(path)) is not None:
        return vocabulary
    if not any(map(cached_path, TOKENIZER_FILES)):
        return None
    return Vocabulary(vocab_size, _MERGES_A_WORD * vocab_size, is_counted=False)


def gguf_vocabulary(source: GGUFSource) -> Vocabulary | None:
    """The vocabulary of a GGUF file; None if it has none. Merges that the file leaves to its reader are estimated from
    its words."""
    if not (num_words := source.num_words):
        return None
    if source.field("tokenizer.ggml.model") == "t5":
        return Vocabulary(num_words, is_unigram=True, of_gguf=True)
    return Vocabulary(num_words, source.num_merges or _MERGES_A_WORD * num_words, of_gguf=True)


def count_words(path: Path) -> Vocabulary | None:
    """The vocabulary of a tokenizer.json, counted by its quotation marks, so to within a few; None if it has none."""
    data = path.read_bytes()
    names = ("added_tokens", "vocab", "merges")
    places = {name: place for name in names if (place := _list_of(data, name)) is not None}
    if "vocab" not in places:
        return None

    def num_of(name: str, mark: bytes) -> int:
        if name not in places:
            return 0
        start = places[name].stop
        stop = min((other.start for other in places.values() if other.start > start), default=len(data))
        text = data[start:stop].replace(rb"\\", b"")  # so that a backslash before a mark always escapes it
        return text.count(mark) - text.count(b"\\" + mark)

    num_words, num_merges = num_of("vocab", b'"') // 2, num_of("merges", b'"') // 2
    if "merges" in places and _IN_PAIRS.match(data, places["merges"].stop):
        num_merges //= 2  # [left, right], not "left right"
    is_unigram = data.startswith(b"[", places["vocab"].stop)
    return Vocabulary(num_words, num_merges, num_of("added_tokens", b'"content"'), is_unigram)


def _list_of(data: bytes, name: str) -> range | None:
    """The range from the name of a list or table to its bracket. A word of a vocabulary may equal the name."""
    key = f'"{name}"'.encode()
    position = data.find(key)
    while position >= 0:
        if (bracket := _BEFORE_LIST.match(data, position + len(key))) is not None:
            return range(position, bracket.end())
        position = data.find(key, position + 1)
    return None


def _num_slots(num_entries: int) -> int:
    """The slots of a hash table that has grown to `num_entries`."""
    return 0 if not num_entries else max(4, 1 << (-(-num_entries * 8 // 7) - 1).bit_length())


def release_copies(tokenizer: Any) -> None:
    """Drop the Python objects that a fast tokenizer's vocabulary was built from, if no method reads them."""
    if not getattr(tokenizer, "is_fast", False):
        return
    used = set(_names_in_methods(type(tokenizer)))
    released = [name for name in _COPIES if name in vars(tokenizer) and name not in used]
    for name in released:
        delattr(tokenizer, name)
    if released:
        # Added tokens were allocated last, between the copies; a copy of them lets that memory be freed.
        with suppress(Exception):  # an option that cannot be copied stays in place
            tokenizer.init_kwargs = pickle.loads(pickle.dumps(tokenizer.init_kwargs))
    give_back_freed()


def _names_in_methods(kind: type) -> Iterator[str]:
    """Names that the methods of a class and its bases use, except constructors."""
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
