"""`KnownTexts`: the tokens of texts; of a text that begins as a known one, only the end is tokenized.

A long text is cut at safe places (`text_cuts`), each at least `SECTION` characters behind the last one, so that texts
with a common beginning have the same sections. The tokens of a section are remembered for its owner: no request can
learn from the time of its answer that another owner sent a text. A tokenizer without safe cuts gets the whole text.

Invariants
    K1  the ids equal those of one call of the tokenizer.
    K2  sections of an owner are found by that owner alone; without an owner no section is remembered.
    K3  the remembered sections have at most `max_bytes`; those unused for longest are forgotten first.

Any thread may call it. Cost: one call of the tokenizer for each new section, one comparison for a known one.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Hashable
from functools import cached_property
from typing import Any

import numpy as np

from quire.cache.prefix_key import PrefixKey
from quire.scheduler.text_cuts import cut_pattern, safe_cuts
from quire.step import Int32Array

__all__ = ["SECTION", "KnownTexts", "owner_of"]

SECTION = 4096  # characters: 1 ms of a tokenizer
_ENTRY_BYTES = 400  # of a section, in addition to its characters and ids


def owner_of(key: PrefixKey) -> Hashable:
    """The owner of a request's texts: requests that may share cached content share texts."""
    return key.tenant, key.cache_salt, key.namespace


class KnownTexts:
    """See the module's text. tokenizer: of transformers."""

    def __init__(self, tokenizer: Any, *, section: int = SECTION, max_bytes: int = 32 << 20) -> None:
        self.tokenizer = tokenizer
        self.num_found_characters = 0  # of texts, in known sections
        self._section = section
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sections: OrderedDict[tuple[Hashable, str], Int32Array] = OrderedDict()
        self._lock = threading.Lock()

    def prove(self) -> None:
        """Looks for safe cuts, which the first long text would do; up to a second with a large vocabulary."""
        _ = self._pattern

    def encode(
        self, text: str, *, add_special_tokens: bool = True, owner: Hashable | None = None
    ) -> list[int]:
        """The ids of a text. owner: who may find its sections again, such as a tenant with a salt."""
        if len(text) < 2 * self._section or self._pattern is None:
            return self._call(text, add_special_tokens)
        before, after = self._around if add_special_tokens and self._around else ([], [])
        ids, start = list(before), 0
        while (cut := self._pattern.search(text, start + self._section)) is not None:
            ids += self._section_ids(text[start : cut.start()], owner)
            start = cut.start()
        return ids + self._call(text[start:], False) + after

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Finds cuts; None without a kind that is safe."""
        cuts = frozenset() if self.tokenizer is None else safe_cuts(self.tokenizer)
        return cut_pattern(cuts) if cuts and self._around is not None else None

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and after a text; None if they differ between two texts."""
        around = []
        for text in ("a", "Two words"):
            inner, whole = self._call(text, False), self._call(text, True)
            places = [at for at in range(len(whole) - len(inner) + 1) if whole[at : at + len(inner)] == inner]
            if len(places) != 1:
                return None
            around.append((whole[: places[0]], whole[places[0] + len(inner) :]))
        return around[0] if around[0] == around[1] else None

    def _call(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def _section_ids(self, section: str, owner: Hashable | None) -> list[int]:
        if owner is None:
            return self._call(section, False)
        key = (owner, section)
        with self._lock:
            known = self._sections.get(key)
            if known is not None:
                self._sections.move_to_end(key)
                self.num_found_characters += len(section)
        if known is not None:
            return known.tolist()
        ids = self._call(section, False)
        array = np.array(ids, np.int32)
        with self._lock:
            if key not in self._sections:
                self._sections[key] = array
                self._num_bytes += _num_bytes(section, array)
            while self._num_bytes > self._max_bytes:
                (_, oldest), array = self._sections.popitem(last=False)
                self._num_bytes -= _num_bytes(oldest, array)
        return ids


def _num_bytes(section: str, ids: Int32Array) -> int:
    width = 1 if section.isascii() else 4
    return _ENTRY_BYTES + width * len(section) + ids.nbytes
