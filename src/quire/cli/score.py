"""`quire score`: the log probability that a model gives to texts: tokens, perplexity, tokens a second.

A text longer than the model's longest sequence is scored in windows that overlap: each token once, in the first window
that has it, so that all but those of the first window have at least `window - stride` tokens before them.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.opening import open_llm
from quire.config import EngineConfig
from quire.engine.scored_prompt import ScoredPrompt, perplexity_of
from quire.errors import ArgumentError, PromptError
from quire.scheduler.prompts import encode

if TYPE_CHECKING:
    from quire.engine.llm import LLM

__all__ = ["Window", "read_texts", "score", "windows"]


@dataclass(frozen=True)
class _Text:
    """A text or token ids, its place for messages and the table, and the first position to score."""

    place: str
    prompt: str | list[int]
    start: int = 0


@dataclass(frozen=True)
class Window:
    """Tokens that are scored together; those before `start` only come before the others. offset: the place in the text
    of the window's first token."""

    token_ids: list[int]
    start: int
    offset: int


def windows(
    token_ids: Sequence[int], size: int, stride: int, prefix: Sequence[int] = (), start: int = 0
) -> list[Window]:
    """Windows of at most `size` tokens that together score each token from `start` on once.

    Each begins `stride` tokens behind the one before, 1 to size - max(1, len(prefix)); all but the first have `prefix`
    before their tokens.
    """
    tokens, room = list(token_ids), size - len(prefix)
    found = [Window(tokens[:size], start, 0)] if start < size else []
    begin, num_scored = 0, size
    while num_scored < len(tokens):
        begin += stride
        stop = min(len(tokens), begin + room)
        if stop > max(num_scored, start):
            offset = begin - len(prefix)
            first = max(num_scored, start) - offset
            found.append(Window([*prefix, *tokens[begin:stop]], first, offset))
        num_scored = max(num_scored, stop)
    return found


def read_texts(source: str) -> Iterator[_Text]:
    """The texts of a file, or of standard input for `-`.

    A file is one text. Each line of a `.jsonl` file is one: a JSON string, a list of token ids, or an object with such
    a `prompt` and perhaps a `start`.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"expected a readable UTF-8 file of texts, got {source}: {error}") from error
    if not source.endswith(".jsonl"):
        yield _Text(source, text)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _text_of_json(line, f"{source}:{number}")


def _text_of_json(line: str, place: str) -> _Text:
    expected = 'a JSON string, a list of token ids, or {"prompt": either, "start": N}'
    try:
        value: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ArgumentError(f"expected {expected} at {place}, got {line[:60]!r}: {error}") from error
    fields = value if isinstance(value, dict) else {"prompt": value}
    prompt: Any = fields.get("prompt")
    start: Any = fields.get("start", 0)
    if not isinstance(prompt, str) and not _is_token_ids(prompt):
        raise ArgumentError(f"expected {expected} at {place}, got {line[:60]!r}")
    if type(start) is not int or start < 0:
        raise ArgumentError(f"expected a start of 0 or more at {place}, got {start!r}")
    return _Text(place, prompt, start)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


@options.engine_flags()
def score(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Texts: each file is one, or each line of a .jsonl; - is standard input."
        ),
    ],
    window: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens of a longer text that are scored together; default: --max-model-len."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens between the beginnings of two windows; default: half a window."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, with the score of each token.")
    ] = False,
    **engine: Any,
) -> None:
    """Prints the perplexity of the texts in FILE, and tokens a second."""
    texts = [text for source in files for text in read_texts(source)]
    for text in texts:
        if not text.prompt:
            raise PromptError(f"expected text, got none - in {text.place}")
    if not texts:
        raise PromptError(f"expected at least one text, got none - in {', '.join(files)}")
    config = EngineConfig(**engine)

    with open_llm(config) as llm:
        encoded = _encode(texts, llm.tokenizer)
        parts = _windows(texts, encoded, llm, window, stride)
        started = time.perf_counter()
        scored = llm.score(
            [part.token_ids for _, part in parts],
            start=[part.start for _, part in parts],
            progress=sys.stderr.isatty(),
        )
        seconds = time.perf_counter() - started
    results = _joined(encoded, parts, scored)
    if as_json:
        print(_as_json(texts, results, seconds))
        return
    print(f"{'tokens':>10}{'cached':>10}{'perplexity':>14}  text")
    for text, result in zip(texts, results, strict=True):
        print(
            f"{len(result.token_ids):>10}{result.num_cached_tokens:>10}{_shown(result.perplexity):>14}  {text.place}"
        )
    num_scored = sum(result.num_scored for result in results)
    whole = perplexity_of(math.fsum(result.total for result in results), num_scored)
    num_tokens = sum(len(result.token_ids) for result in results)
    num_cached = sum(result.num_cached_tokens for result in results)
    print(
        f"{num_tokens:>10}{num_cached:>10}{_shown(whole):>14}  all: {num_scored} tokens scored in {seconds:.2f} s, "
        f"{num_scored / seconds:.0f} tokens/s"
    )


def _encode(texts: Sequence[_Text], tokenizer: Any) -> list[list[int]]:
    """The tokens of the texts. *raises:* PromptError; ArgumentError: a start behind them."""
    encoded = [list(encode(text.prompt, tokenizer, text.place).token_ids) for text in texts]
    for text, tokens in zip(texts, encoded, strict=True):
        if text.start >= len(tokens):
            raise ArgumentError(
                f"expected a start before the last of {len(tokens)} tokens, got {text.start} - in {text.place}"
            )
    return encoded


def _windows(
    texts: Sequence[_Text], encoded: Sequence[list[int]], llm: LLM, size: int | None, stride: int | None
) -> list[tuple[int, Window]]:
    """The windows of all texts, each with the number of its text. *raises:* ArgumentError."""
    longest = llm.max_model_len
    size = longest if size is None else size
    if not 2 <= size <= longest:
        raise ArgumentError(f"expected a window of 2 to {longest} tokens, got {size} - in --window")
    first: Any = getattr(llm.tokenizer, "bos_token_id", None)
    stride = max(1, size // 2) if stride is None else stride
    if not 1 <= stride < size:
        raise ArgumentError(
            f"expected a stride of 1 to {size - 1}, less than the window, got {stride} - in --stride"
        )
    return [
        (number, part)
        for number, (text, tokens) in enumerate(zip(texts, encoded, strict=True))
        for part in windows(tokens, size, stride, [first] if tokens[0] == first else [], text.start)
    ]


def _joined(
    encoded: Sequence[list[int]], parts: Sequence[tuple[int, Window]], scored: Sequence[ScoredPrompt]
) -> list[ScoredPrompt]:
    """The scores of each text, from those of its windows."""
    scores: list[list[float | None]] = [[None] * len(tokens) for tokens in encoded]
    num_cached = [0] * len(encoded)
    for (number, part), result in zip(parts, scored, strict=True):
        num_cached[number] += result.num_cached_tokens
        for place in range(part.start, len(part.token_ids)):
            scores[number][part.offset + place] = result.logprobs[place]
    return [ScoredPrompt(tokens, scores[number], num_cached[number]) for number, tokens in enumerate(encoded)]


def _as_json(texts: Sequence[_Text], results: Sequence[ScoredPrompt], seconds: float) -> str:
    """The object that `--json` prints. A perplexity without scores is null."""
    rows = [
        {
            "text": text.place,
            "token_ids": result.token_ids,
            "logprobs": result.logprobs,
            "num_cached_tokens": result.num_cached_tokens,
            "num_scored": result.num_scored,
            "total": result.total,
            "perplexity": _finite(result.perplexity),
        }
        for text, result in zip(texts, results, strict=True)
    ]
    num_scored, total = sum(row["num_scored"] for row in rows), math.fsum(row["total"] for row in rows)
    whole = {
        "num_scored": num_scored,
        "total": total,
        "perplexity": _finite(perplexity_of(total, num_scored)),
        "seconds": seconds,
        "tokens_per_second": num_scored / seconds,
    }
    return json.dumps({"texts": rows, **whole})


def _shown(perplexity: float) -> str:
    return "-" if math.isnan(perplexity) else f"{perplexity:.4f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
