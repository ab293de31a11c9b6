"""The client of the servers: requests of real text as token ids, one stream, a closed loop and an open one.

Text is cut into tokens once, by a byte-pair encoding learned here from the same texts, so that all servers get the
same ids. They mean nothing to a model with random weights; only their number and their common beginnings count.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from serving import Texts, request_bytes

__all__ = ["Outcome", "Request", "Requests", "Saturation", "ask", "closed_loop", "open_loop", "poisson_times"]

PATIENCE_S = 60.0  # of a request under load; later is a failure
LONG_PATIENCE_S = 300.0  # of one that warms a server up, or is one of a closed loop
TRAINING_TEXTS = 2000


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int


class Requests:
    """Draws requests; the same for the same seed."""

    def __init__(self, texts: Texts, vocab_size: int, max_prompt: int) -> None:
        """max_prompt: tokens; longer prompts lose their end."""
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        self._texts, self._max_prompt = texts, max_prompt
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        draw = random.Random(0)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        self._tokenizer.train_from_iterator((texts.prompt(draw) for _ in range(TRAINING_TEXTS)), trainer)

    def draw(self, seed: str) -> Iterator[Request]:
        """Without end."""
        draw = random.Random(seed)
        while True:
            ids: list[int] = self._tokenizer.encode(self._texts.prompt(draw)).ids
            yield Request(ids[: self._max_prompt], draw.randint(8, 64))


@dataclass
class Outcome:
    """The result of one request.

    Args:
        first_s: from its arrival to the first text. gaps_s: between pieces of text. last_at: on the clock of
            `time.perf_counter`. error: None if all its tokens came.
    """

    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    last_at: float = 0.0
    num_tokens: int = 0
    error: str | None = None


async def ask(
    port: int, request: Request, arrived_at: float | None = None, patience_s: float = LONG_PATIENCE_S
) -> Outcome:
    """One request on its own connection. arrived_at: its due time, if not now; a delay counts."""
    arrived_at = time.perf_counter() if arrived_at is None else arrived_at
    outcome = Outcome()
    try:
        async with asyncio.timeout(patience_s):
            await _stream(port, request, arrived_at, outcome)
    except TimeoutError:
        outcome.error = f"not done in {patience_s:.0f} s"
    except (OSError, ValueError, LookupError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def _stream(port: int, request: Request, arrived_at: float, outcome: Outcome) -> None:
    body = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes(body))
        status = int((await reader.readline()).split()[1])
        if status != 200:
            raise ValueError(f"status {status}: {(await reader.read(2000)).decode(errors='replace')[-300:]}")
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"the stream says {event['error']}")
            if event["choices"] and event["choices"][0]["text"]:
                if outcome.last_at:
                    outcome.gaps_s.append(now - outcome.last_at)
                else:
                    outcome.first_s = now - arrived_at
                outcome.last_at = now
            if event.get("usage"):
                outcome.num_tokens = event["usage"]["completion_tokens"]
        if outcome.num_tokens != request.max_tokens or not outcome.last_at:
            raise ValueError(f"expected {request.max_tokens} tokens as text, got {outcome.num_tokens}")
    finally:
        writer.transport.abort()


@dataclass(frozen=True)
class Saturation:
    """requests_per_s, and how long one takes with all clients at once."""

    requests_per_s: float
    latency_s: float


async def closed_loop(port: int, requests: Iterator[Request], num_clients: int, seconds: float) -> Saturation:
    """Clients that each ask again as soon as they are answered, for so long; the first third is left to settle.

    *raises:* ValueError if a request fails.
    """
    began = time.perf_counter()
    until = began + seconds
    spans: list[tuple[float, float]] = []

    async def client() -> None:
        while (started := time.perf_counter()) < until:
            outcome = await ask(port, next(requests))
            if outcome.error is not None:
                raise ValueError(outcome.error)
            spans.append((started, outcome.last_at))

    await asyncio.gather(*[client() for _ in range(num_clients)])
    since = began + seconds / 3
    # A request counts by the share of its time that lies in the time that counts.
    served = sum(max(0.0, min(end, until) - max(start, since)) / (end - start) for start, end in spans)
    return Saturation(served / (until - since), sum(end - start for start, end in spans) / len(spans))


async def open_loop(port: int, requests: Iterator[Request], times: list[float]) -> list[Outcome]:
    """A request at each of these times, in seconds from now, independent of the earlier requests."""
    given = [next(requests) for _ in times]  # drawn before, not while others are timed
    began, tasks = time.perf_counter(), []
    for request, at in zip(given, times, strict=True):
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(port, request, began + at, PATIENCE_S)))
    return await asyncio.gather(*tasks)


def poisson_times(rate: float, seconds: float, seed: str) -> list[float]:
    """Of as many arrivals as that rate has in that time: a Poisson process, given how many come."""
    draw = random.Random(seed)
    return sorted(draw.random() * seconds for _ in range(max(1, round(rate * seconds))))
