r"""`safe_cuts`: where a text may be cut so that the tokens of the parts are those of the whole.

Two kinds of cut: before a space between two ASCII letters ("x| y"), and after a newline between two ("x\n|y").
A kind is safe if each stage of the tokenizer is proved to treat the parts as it treats the whole; an unknown stage
allows none.

    added tokens      none contains, begins or ends with characters that a match could stretch over the cut
    normalizer        works character by character here, or replaces the space alone
    pre-tokenizer     no match of a pattern contains the cut, looks back over it or changes for what follows it. A
                      pattern is proved by its alternatives, which are listed here; all others are unknown
    model             its words end at the cut. If the pre-tokenizer does not cut there: BPE whose vocabulary has no
                      word over the cut, so that no merge crosses it; merges on both sides do not affect each other
    post-processor    adds the same tokens around any text

Cost: one look at the vocabulary if the pre-tokenizer does not cut at spaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

__all__ = ["Cut", "cut_pattern", "safe_cuts"]

Cut = Literal["space", "newline"]
_PATTERNS = {"space": r"(?<=[A-Za-z])(?= [A-Za-z])", "newline": r"(?<=[A-Za-z]\n)(?=[A-Za-z])"}
_BOTH: frozenset[Cut] = frozenset(("space", "newline"))
_SPACE: frozenset[Cut] = frozenset(("space",))
_NONE: frozenset[Cut] = frozenset()

# Alternatives of patterns. Each matches letters with at most one other character before them, and begins a match at "y"
# or " y"; it reads nothing before the match, and after it at most a contraction such as 's.
_LETTERS = {
    r"\p{L}+",
    r" ?\p{L}+",
    r"[ ._]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]{upper}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]{lower}"
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        for upper, lower in (("*", "+"), ("+", "*"))
    ),
}
# These match no letter before a space and none after a newline. The lookahead is read behind blanks alone, and a cut
# has a letter or a single newline before it.
_OTHERS = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)"),
    *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+", r" ?\p{N}{1,3}", r"[0-9]", r"\d"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    *(
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"[ ]+(?!\S)",
        r"\s+",
        r"\s",
        r"\n+",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    ),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
}
_AT_LINE_START = r"(?<![^\n])[ \t]+"  # looks back, but never at a letter
_BY_CHARACTER = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}
_MAKES_BLANKS = {"BertNormalizer", "Nmt", "Precompiled"}  # a newline may become a space
_SPLITS_AT_BLANKS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_LEAVES_LETTERS = {"Digits", "Punctuation"}
_SAME_AROUND = {"TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel"}


def cut_pattern(cuts: Iterable[Cut]) -> re.Pattern[str]:
    """Finds the empty strings at which a text may be cut."""
    return re.compile("|".join(_PATTERNS[cut] for cut in sorted(cuts)))


def safe_cuts(tokenizer: Any) -> frozenset[Cut]:
    """The kinds of cut that are safe for a tokenizer of transformers; none if it is not proved."""
    if not _is_plain(tokenizer):
        return _NONE
    backend = tokenizer.backend_tokenizer
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    space, normalized = _of_normalizers(_parts(normalizer, "normalizers"))
    cuts = _of_added_tokens(backend, space) & normalized
    kept, split, space = _of_pre_tokenizers(_parts(pre_tokenizer, "pretokenizers"), space)
    cuts &= kept
    if any(part["type"] not in _SAME_AROUND for part in _parts(_state(backend.post_processor), "processors")):
        return _NONE
    model = backend.model
    if getattr(model, "dropout", None):
        return _NONE
    unsplit = cuts - split
    return (cuts & split) | (_in_no_word(backend, unsplit, space) if unsplit else _NONE)


def _is_plain(tokenizer: Any) -> bool:
    """Whether calls of the tokenizer are those of its Rust backend: no class of the model's own in between."""
    from transformers import PreTrainedTokenizerFast

    names = ("__call__", "_encode_plus", "_batch_encode_plus")
    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names
    )


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _parts(state: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The parts of a sequence, of a sequence in it too."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for child in state[key] for part in _parts(child, key)]


def _of_added_tokens(backend: Any, space: str) -> frozenset[Cut]:
    """space: the character that the normalizer makes of a space."""
    for token in backend.get_added_tokens_decoder().values():
        texts = [token.content]
        if token.normalized and backend.normalizer is not None:
            texts.append(backend.normalizer.normalize_str(token.content))
        for text in texts:
            if re.search(rf"[A-Za-z][ {space}]|[ {space}][A-Za-z]|[A-Za-z]\n|\n[A-Za-z]", text):
                return _NONE
            if not text or (token.rstrip and text[-1].isalpha()) or (token.lstrip and text[0].isalpha()):
                return _NONE
            if token.single_word and (text[0].isspace() or text[-1].isspace()):
                return _NONE
    return _BOTH


def _of_normalizers(parts: list[dict[str, Any]]) -> tuple[str, frozenset[Cut]]:
    """The character that a space becomes, and the cuts at which the normalizers work on both sides alone."""
    space, cuts = " ", _BOTH
    for part in parts:
        kind = part["type"]
        if kind in _MAKES_BLANKS:
            cuts &= _SPACE
        elif kind == "Replace" and part["pattern"] == {"String": " "} and part["content"] == "▁":
            space = "▁"
        elif kind == "Replace" and part["pattern"] == {"Regex": " {2,}"}:
            continue  # a cut has a single space
        elif kind not in _BY_CHARACTER:
            return space, _NONE
    return space, cuts


def _of_pre_tokenizers(parts: list[dict[str, Any]], space: str) -> tuple[frozenset[Cut], frozenset[Cut], str]:
    """The cuts at which they treat the parts as the whole, those at which they cut themselves, and what a space is."""
    kept, split = _BOTH, _NONE
    for part in parts:
        kind = part["type"]
        if kind == "Metaspace":
            # A space at the start is never doubled; a letter there would get one.
            kept &= _BOTH if part.get("prepend_scheme") == "never" else _SPACE
            split |= _SPACE if part.get("split", True) else _NONE
            space = part["replacement"]
        elif kept <= split:
            continue  # each word is treated alone from here on
        elif space != " ":
            if kind != "Split" or part["pattern"] != {"String": " "}:
                return _NONE, _NONE, space
        elif kind in _SPLITS_AT_BLANKS:
            split |= _BOTH
        elif kind == "ByteLevel":
            kept &= _SPACE if part["add_prefix_space"] else _BOTH
            split |= _BOTH if part["use_regex"] else _NONE
        elif kind == "Split" and "Regex" in part["pattern"]:
            if (part["behavior"], part["invert"]) not in (("Isolated", False), ("Removed", True)):
                return _NONE, _NONE, space
            pattern = (
                part["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")
            )  # some files have both
            alternatives = set(_alternatives(pattern))
            if not alternatives <= _LETTERS | _OTHERS | {_AT_LINE_START}:
                return _NONE, _NONE, space
            kept &= _BOTH if _AT_LINE_START not in alternatives else frozenset(("newline",))
            split |= _BOTH if alternatives & _LETTERS else _NONE
        elif kind not in _LEAVES_LETTERS:
            return _NONE, _NONE, space
    return kept, split, space


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern, split at each "|" outside of groups and classes."""
    found, depth, start, at, in_class = [], 0, 0, 0, False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and not depth:
            found.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*found, pattern[start:]]


def _in_no_word(backend: Any, cuts: frozenset[Cut], space: str) -> frozenset[Cut]:
    """The cuts that merges never cross, if the model is a BPE that knows words by their merges alone."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.ignore_merges:
        return _NONE
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return _NONE
    words = backend.get_vocab(with_added_tokens=False)
    found: set[Cut] = set()
    for cut in cuts:
        # A character that is no word may become one token together with its neighbours.
        blank, over = (space, f"[A-Za-z]{space}") if cut == "space" else ("\n", r"\n[A-Za-z]")
        if blank in words and not any(map(re.compile(over).search, words)):
            found.add(cut)
    return frozenset(found)
