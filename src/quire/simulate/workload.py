"""Workloads: requests with arrival times and lengths, from a trace file or synthetic.

A workload holds lengths and identities, no text: `token_ids` generates ids of the right length, equal where the trace
has equal contents. The same seed gives the same workload.

Trace formats, recognised by the file's content:

    Mooncake jsonl   {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}; equal hash ids are equal
                     blocks of 512 tokens, in any request
    Azure csv        TIMESTAMP,ContextTokens,GeneratedTokens; lengths only, without shared content

Cost: reading is O(file).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ArgumentError
from quire.simulate.lengths import Lengths

__all__ = ["MOONCAKE_BLOCK_TOKENS", "TraceRequest", "Workload", "read_trace", "synthetic"]

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """A request. content_ids: the identity of each block of MOONCAKE_BLOCK_TOKENS prompt tokens, if known."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    content_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. name: their origin in words."""

    name: str
    requests: tuple[TraceRequest, ...]
    seed: int = 0

    def limited(self, max_model_len: int, num_requests: int | None = None) -> Workload:
        """The first `num_requests` requests that fit in `max_model_len` tokens.

        *raises:* ArgumentError if none fits.
        """
        fitting = [request for request in self.requests if request.num_tokens <= max_model_len]
        if not fitting:
            shortest = min(request.num_tokens for request in self.requests)
            raise ArgumentError(
                f"expected requests of at most {max_model_len} tokens, prompt and output, in {self.name}; the shortest "
                f"has {shortest}; raise the maximum length"
            )
        return Workload(self.name, tuple(fitting[:num_requests]), self.seed)

    def token_ids(self, index: int, vocab_size: int) -> np.ndarray:
        """int32 [num_prompt_tokens]: ids of request `index`'s prompt, below `vocab_size`."""
        request = self.requests[index]
        if not request.content_ids:
            return _ids([self.seed, 0, index], request.num_prompt_tokens, vocab_size)
        blocks = [_ids([self.seed, 1, i], MOONCAKE_BLOCK_TOKENS, vocab_size) for i in request.content_ids]
        return np.concatenate(blocks)[: request.num_prompt_tokens]


def _ids(seed: list[int], count: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, count, dtype=np.int32)


def synthetic(lengths: Lengths, num_requests: int, seed: int = 0) -> Workload:
    """Requests that all arrive at the start, with lengths drawn from `lengths`."""
    generator = np.random.default_rng(seed)
    prompts = lengths.prompt.draw(generator, num_requests)
    outputs = lengths.output.draw(generator, num_requests)
    requests = [TraceRequest(0.0, p, o) for p, o in zip(prompts.tolist(), outputs.tolist(), strict=True)]
    return Workload(f"lengths {lengths.text}, seed {seed}", tuple(requests), seed)


def read_trace(path: str | Path) -> Workload:
    """The requests of a trace file; arrival times count from the first.

    *raises:* ArgumentError: an unreadable file, or one in neither format, with the line.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            if first.lstrip().startswith("{"):
                requests = list(_mooncake(file, path))
            elif first.strip().split(",") == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
                requests = list(_azure(file, path))
            else:
                raise ArgumentError(
                    f"expected a Mooncake jsonl or an Azure csv trace (header TIMESTAMP,ContextTokens,"
                    f"GeneratedTokens), got a file that begins with {first[:60]!r} - in {path}"
                )
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"expected a readable trace file, got {path}: {error}") from error
    if not requests:
        raise ArgumentError(f"expected at least one request, got none - in {path}")
    start = min(request.arrival_s for request in requests)
    requests = [
        TraceRequest(r.arrival_s - start, r.num_prompt_tokens, r.num_output_tokens, r.content_ids)
        for r in requests
    ]
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(path.name, tuple(requests))


def _mooncake(file: Any, path: Path) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
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


def _azure(file: Any, path: Path) -> Iterator[TraceRequest]:
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
