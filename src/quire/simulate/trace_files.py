"""Traces of requests as files, plain or gzipped. The content of a file decides its format:

    Mooncake jsonl   {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}; equal hash ids are equal
                     blocks of 512 tokens, in any request. The last block may be partial
    agents' jsonl    a session a line: {"block_size", "requests": [{"t": s, "in", "out", "hash_ids": [...], "stop",
                     "api_time": s} or {"requests": [...]} of a sub-agent]}; equal hash ids of a session are equal
                     blocks. Only full blocks have an id
    Azure csv        TIMESTAMP,ContextTokens,GeneratedTokens; lengths only, without content

Requests without a prompt are left out, and in the first and last format those without an answer.

Cost: reading is O(file).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from quire.errors import ArgumentError
from quire.simulate.workload import MOONCAKE_BLOCK_TOKENS, TraceRequest, Workload

__all__ = ["read_trace"]

_GZIP = b"\x1f\x8b"
_SESSION_EVERY_S = 5.0
_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def read_trace(
    path: str | Path, *, block_tokens: int | None = None, session_every_s: float | None = None
) -> Workload:
    """The requests of a trace file; arrival times count from the first.

    Args:
        block_tokens: of a block of `content_ids`, a multiple of the trace's own, which is the default. A block then
            has the identity of its last one, and a beginning shorter than a block has none.
        session_every_s: of an agents' trace, whose times count from each session's start: a session begins so often.
            Default: 5.

    Raises:
        ArgumentError: an unreadable file, or one in no format of the above, with the line; a wrong `block_tokens`; an
        argument that the format has no use for.
    """
    path = Path(path)
    own_tokens, given = (
        MOONCAKE_BLOCK_TOKENS,
        {"block_tokens": block_tokens, "session_every_s": session_every_s},
    )
    try:
        file = _opened(path)
        first = file.readline()
        file.seek(0)
        if first.lstrip().startswith("{"):
            if "requests" in _json(first, path, 1):
                every_s = _SESSION_EVERY_S if session_every_s is None else session_every_s
                own_tokens, requests = _agents(file, path, block_tokens, every_s)
            else:
                _refuse(given, ["session_every_s"], "sessions", path)
                group = _group(own_tokens, block_tokens, path)
                requests = [
                    replace(request, content_ids=request.content_ids[group - 1 :: group])
                    for request in _mooncake(file, path)
                ]
        elif first.strip().split(",") == _AZURE:
            _refuse(given, ["session_every_s", "block_tokens"], "content, only lengths", path)
            requests = list(_azure(file, path))
        else:
            raise ArgumentError(
                "expected a Mooncake jsonl, an agents' jsonl or an Azure csv trace (header "
                f"{','.join(_AZURE)}), got a file that begins with {first[:60]!r} - in {path}"
            )
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ArgumentError(f"expected a readable trace file, got {path}: {error}") from error
    if not requests:
        raise ArgumentError(f"expected at least one request, got none - in {path}")
    start = min(request.arrival_s for request in requests)
    requests = [replace(request, arrival_s=request.arrival_s - start) for request in requests]
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(path.name, tuple(requests), block_tokens=block_tokens or own_tokens)


def _opened(path: Path) -> TextIO:
    data = path.read_bytes()
    return io.StringIO((gzip.decompress(data) if data.startswith(_GZIP) else data).decode(), newline="")


def _refuse(given: dict[str, Any], names: list[str], missing: str, path: Path) -> None:
    for name in names:
        if given[name] is not None:
            raise ArgumentError(
                f"expected no {name}, got {given[name]}: {path} has no {missing} - in `{name}`; leave it out"
            )


def _json(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ArgumentError(
            f"expected a JSON object, got {line[:80]!r} ({error}) - in {path}, line {number}"
        ) from error
    if not isinstance(record, dict):
        raise ArgumentError(f"expected a JSON object, got {line[:80]!r} - in {path}, line {number}")
    return record


def _group(own_tokens: int, block_tokens: int | None, path: Path) -> int:
    """How many of the trace's blocks one of `block_tokens` is."""
    if block_tokens is None:
        return 1
    if block_tokens < own_tokens or block_tokens % own_tokens:
        raise ArgumentError(
            f"expected a multiple of {own_tokens} tokens, the trace's own block, got {block_tokens} - in "
            f"`block_tokens`, for {path}"
        )
    return block_tokens // own_tokens


def _mooncake(file: TextIO, path: Path) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        record = _json(line, path, number)
        try:
            request = TraceRequest(
                float(record["timestamp"]) / 1000,
                int(record["input_length"]),
                int(record["output_length"]),
                tuple(int(i) for i in record["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                "expected a JSON object with timestamp, input_length, output_length and hash_ids, got "
                f"{line[:80]!r} ({type(error).__name__}: {error}) - in {path}, line {number}"
            ) from error
        num_blocks = -(-request.num_prompt_tokens // MOONCAKE_BLOCK_TOKENS)
        if len(request.content_ids) != num_blocks:
            raise ArgumentError(
                f"expected {num_blocks} hash ids for {request.num_prompt_tokens} tokens, got "
                f"{len(request.content_ids)} - in {path}, line {number}"
            )
        if _has_output(request, path, number):
            yield request


def _agents(
    file: TextIO, path: Path, block_tokens: int | None, session_every_s: float
) -> tuple[int, list[TraceRequest]]:
    """The trace's own tokens of a block, and its requests. A request without an answer has one token."""
    ids: dict[tuple[int, int], int] = {}
    own_tokens: int | None = None
    requests: list[TraceRequest] = []
    for number, line in enumerate(filter(str.strip, file)):
        session = _json(line, path, number + 1)
        size = session.get("block_size")
        if not isinstance(size, int) or size < 1 or own_tokens not in (None, size):
            raise ArgumentError(
                f"expected the block_size of the first session, at least 1, got {size!r} - in {path}, line {number + 1}"
            )
        own_tokens, group = size, _group(size, block_tokens, path)
        try:
            for record in _flat(session["requests"]):
                num_prompt_tokens, hash_ids = int(record["in"]), record["hash_ids"]
                if len(hash_ids) != num_prompt_tokens // size:
                    raise ValueError(
                        f"{len(hash_ids)} hash ids for {num_prompt_tokens} tokens in blocks of {size}"
                    )
                request = TraceRequest(
                    session_every_s * number + float(record["t"]),
                    num_prompt_tokens,
                    max(1, int(record["out"])),
                    tuple(ids.setdefault((number, int(i)), len(ids)) for i in hash_ids[group - 1 :: group]),
                    session=str(number),
                    answer_s=float(record.get("api_time") or 0),
                    has_calls=record.get("stop") == "tool_use",
                )
                requests.append(request)
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                "expected a session with one block_size and requests of t, in, out and hash_ids of full blocks, got "
                f"{line[:80]!r} ({type(error).__name__}: {error}) - in {path}, line {number + 1}"
            ) from error
    return own_tokens or 1, [request for request in requests if request.num_prompt_tokens]


def _flat(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A session's requests, with those of its sub-agents in their place."""
    for record in records:
        yield from _flat(record["requests"]) if "requests" in record else [record]


def _azure(file: TextIO, path: Path) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            # Seven digits of a second; datetime reads six.
            arrival = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            request = TraceRequest(arrival, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, TypeError) as error:
            raise ArgumentError(
                f"expected TIMESTAMP,ContextTokens,GeneratedTokens, got {dict(row)} ({error}) - in {path}, "
                f"line {number}"
            ) from error
        if _has_output(request, path, number):
            yield request


def _has_output(request: TraceRequest, path: Path, number: int) -> bool:
    """Whether the request has a prompt and an output. *raises:* ArgumentError: a negative length."""
    if request.num_prompt_tokens < 0 or request.num_output_tokens < 0:
        raise ArgumentError(f"expected lengths of 0 or more, got {request} - in {path}, line {number}")
    return request.num_prompt_tokens > 0 and request.num_output_tokens > 0
