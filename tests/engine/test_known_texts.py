"""Texts that begin as known ones: their ids are those of the whole text, and no owner finds another's."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import quire.weights
from quire.scheduler.known_texts import KnownTexts
from quire.scheduler.text_cuts import safe_cuts

EMBEDDED = Path(quire.weights.__file__).parent / "embedded"
SOURCES = sorted(Path(quire.weights.__file__).parent.parent.glob("**/*.py"))
ODD = [
    "  \n\n ",
    "\r\n",
    "\t",
    "1234567 89",
    "don't",
    "I'LL ",
    "日本語の文",
    "é́",
    " ﬁ",
    "…",
    "🙂🙂",
    "a\u00a0b",
    "<s>",
    "<|x|> ",
    "..\n",
    "x\n\ny",
    "  x",
]

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{ENDS}"
QWEN = LLAMA.replace("{1,3}", "")
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
]


def by_pattern(*patterns: str) -> Any:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def corpus() -> list[str]:
    return [path.read_text()[:20_000] for path in SOURCES[:40]]


def trained(model: str, pre: Any = None, normalizer: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of a kind, trained on this repository."""
    special = ["<unk>", "<s>", "</s>", "<|x|>"]
    made = {
        "bpe": (models.BPE(unk_token="<unk>", fuse_unk=True, **options), trainers.BpeTrainer),
        "unigram": (models.Unigram(), trainers.UnigramTrainer),
        "wordpiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
    }[model]
    tokenizer = Tokenizer(made[0])  # type: ignore[arg-type]
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    more: dict[str, Any] = {"unk_token": "<unk>"} if model == "unigram" else {}
    if isinstance(pre, pre_tokenizers.ByteLevel) or "ByteLevel" in repr(pre):
        more["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = made[1](vocab_size=1200, special_tokens=special, show_progress=False, **more)
    # A text without words of its own would be one word as long as the text: lines then.
    tokenizer.train_from_iterator(
        (line for text in corpus() for line in text.splitlines(keepends=True)), trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def with_prefix() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def in_one_word(pre: Any) -> Any:
    """BPE over a whole text without pre-tokenizer, whose merges come from single words."""
    tokenizer = trained("bpe", pre_tokenizers.Metaspace(prepend_scheme="never", split=True))
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre
    if isinstance(pre, pre_tokenizers.Split):
        backend.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "embedded": (lambda: AutoTokenizer.from_pretrained(EMBEDDED), {"newline"}),
    "gpt2": (lambda: trained("bpe", GPT2), {"space", "newline"}),
    "gpt2, a space before": (
        lambda: trained("bpe", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        {"space"},
    ),
    "llama 3": (lambda: trained("bpe", by_pattern(LLAMA)), {"space", "newline"}),
    "qwen": (lambda: trained("bpe", by_pattern(QWEN), normalizers.NFC()), {"space", "newline"}),
    "o200k": (lambda: trained("bpe", by_pattern(O200K)), {"space", "newline"}),
    "deepseek": (lambda: trained("bpe", by_pattern(*DEEPSEEK)), {"space", "newline"}),
    "metaspace, unigram": (lambda: trained("unigram", pre_tokenizers.Metaspace()), {"space"}),
    "t5": (
        lambda: trained(
            "unigram", pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        ),
        {"space"},
    ),
    "bert": (
        lambda: trained("wordpiece", pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
        {"space"},
    ),
    "mistral": (
        lambda: trained("bpe", pre_tokenizers.Metaspace(prepend_scheme="first", split=True)),
        {"space"},
    ),
    "mistral, one word": (
        lambda: in_one_word(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        {"space"},
    ),
    "gemma": (lambda: in_one_word(pre_tokenizers.Split(" ", "merged_with_previous")), {"space", "newline"}),
    "words over spaces": (lambda: trained("bpe", None, normalizers.Replace(" ", "▁")), {"newline"}),
    "llama 2": (lambda: trained("bpe", None, with_prefix()), set()),
    "unknown pattern": (lambda: trained("bpe", by_pattern(r"\w+\s?|.|\s")), set()),
    "dropout": (lambda: trained("bpe", GPT2, dropout=0.1), set()),
    "letters removed": (lambda: trained("bpe", GPT2, normalizers.Replace(Regex("a b"), "")), set()),
}
_made: dict[str, Any] = {}


def tokenizer_of(kind: str) -> Any:
    if kind not in _made:
        _made[kind] = KINDS[kind][0]()
    return _made[kind]


def texts(seed: int, count: int) -> list[str]:
    """Growing texts with random beginnings in common, of code, prose and odd characters."""
    draw, pieces = random.Random(seed), corpus()
    found = [""]
    for _ in range(count):
        base = draw.choice(found)
        text = base[: draw.randrange(len(base) + 1)]
        for _ in range(draw.randrange(1, 4)):
            piece = draw.choice(pieces)
            start = draw.randrange(len(piece))
            text += piece[start : start + draw.randrange(600)] + "".join(
                draw.choices(ODD, k=draw.randrange(4))
            )
        found.append(text)
    return found[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_whole_text(kind: str) -> None:
    tokenizer, cuts = tokenizer_of(kind), KINDS[kind][1]
    assert safe_cuts(tokenizer) == cuts
    if kind == "dropout":
        return
    known = KnownTexts(tokenizer, section=40)
    for text in texts(3, 60):
        for special in (True, False):
            expected = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert known.encode(text, add_special_tokens=special, owner="a") == expected
    assert bool(known.num_found_characters) == bool(cuts)


@pytest.mark.parametrize("kind", [kind for kind, (_, cuts) in KINDS.items() if cuts])
def test_each_cut_alone_gives_the_ids_of_the_whole(kind: str) -> None:
    """Sections as small as can be: every safe cut of the text is taken."""
    tokenizer = tokenizer_of(kind)
    known = KnownTexts(tokenizer, section=1)
    for text in texts(4, 12):
        assert known.encode(text, owner="a") == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("token", "cuts"),
    [
        (AddedToken("hello world"), set()),
        (AddedToken("word", rstrip=True), set()),
        (AddedToken("word", lstrip=True), set()),
        (AddedToken("<mask>", lstrip=True, rstrip=True), {"space", "newline"}),
        (AddedToken("    "), {"space", "newline"}),
        (AddedToken("word", single_word=True), {"space", "newline"}),
        (AddedToken("\nname"), set()),
    ],
    ids=lambda value: value.content if isinstance(value, AddedToken) else "-".join(sorted(value)) or "none",
)
def test_added_tokens_over_a_cut_allow_none(token: AddedToken, cuts: set[str]) -> None:
    tokenizer = trained("bpe", by_pattern(QWEN))
    tokenizer.add_tokens([token])  # pyright: ignore[reportArgumentType]
    assert safe_cuts(tokenizer) == cuts
    known = KnownTexts(tokenizer, section=1)
    for text in texts(5, 6):
        mixed = text.replace("the ", f"{token.content} ").replace("def ", f" {token.content}    ")
        assert known.encode(mixed, owner="a") == tokenizer(mixed)["input_ids"]


def test_a_tokenizer_with_calls_of_its_own_gets_the_whole_text() -> None:
    class Changed(PreTrainedTokenizerFast):
        def _encode_plus(self, *arguments: Any, **options: Any) -> Any:
            return super()._encode_plus(*arguments, **options)

    inner = tokenizer_of("qwen")
    assert not safe_cuts(Changed(tokenizer_object=inner.backend_tokenizer))
    assert not safe_cuts(object())


class CountedTokenizer:
    """Counts the characters that it reads."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.num_characters = inner, 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return self.inner(text, **options)


def counted(**options: Any) -> tuple[KnownTexts, CountedTokenizer]:
    inner = tokenizer_of("qwen")
    known = KnownTexts(inner, section=100, **options)
    assert known.encode("word " * 100)  # the proof, and the special tokens
    counter = known.tokenizer = CountedTokenizer(inner)
    return known, counter


def test_only_the_end_is_tokenized() -> None:
    known, counter = counted()
    text = " ".join(corpus())[:20_000]
    known.encode(text, owner="a")
    assert counter.num_characters == len(text)
    counter.num_characters = 0
    assert (
        known.encode(text + " and a new question", owner="a")
        == tokenizer_of("qwen")(text + " and a new question")["input_ids"]
    )
    assert counter.num_characters < 2000


def test_no_owner_finds_the_text_of_another() -> None:
    known, counter = counted()
    text = " ".join(corpus())[:5000]
    for owner in ("a", "b", None, None):
        counter.num_characters = 0
        known.encode(text, owner=owner)
        assert counter.num_characters == len(text), owner
    assert known.num_found_characters == 0


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    known, counter = counted(max_bytes=30_000)
    words = " ".join(corpus())
    parts = [words[start : start + 5000] for start in range(0, 100_000, 5000)]
    for part in parts:
        known.encode(part, owner="a")
        assert known._num_bytes <= 30_000
    counter.num_characters = 0
    known.encode(parts[-1], owner="a")
    assert counter.num_characters < 2000
    counter.num_characters = 0
    known.encode(parts[0], owner="a")
    assert counter.num_characters == len(parts[0])
    assert known._num_bytes <= 30_000


def test_any_thread_may_encode() -> None:
    known = KnownTexts(tokenizer_of("qwen"), section=50, max_bytes=20_000)
    given = texts(6, 20)
    expected = [tokenizer_of("qwen")(text)["input_ids"] for text in given]
    wrong: list[int] = []

    def run() -> None:
        for at, text in enumerate(given):
            if known.encode(text, owner="a") != expected[at]:
                wrong.append(at)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
