"""`quire serve` under load: times of clients, cost of the server, blocks and memory left at the end. JSON lines.

    python benchmarks/serving.py [--part load|cost|drops|overload]... [--quick] [--turns N] [--model DIR]
        [--traces DIR]

Server and clients are separate processes on loopback. Without --model the embedded model is served.
  load      64 clients at once; then open loop: requests arrive when their time has come, answered or not, at Poisson
            times and, if the trace is there, at those of an hour of code completion (Azure 2023, compressed):
            time to the first token, time per token, goodput (requests within 1 s and 100 ms), hit rate
  cost      CPU of the server process a streamed token, beyond that of the engine alone, which gets the same
            requests in its own process; and tokens/s of both. They take turns; medians
  drops     connections that send part of a request, read part of an answer and go: the blocks held at the end
  overload  8 times the server's capacity: statuses, memory of the process without the pages of its KV cache at each
            eighth of the time, and its growth for 10 000 requests over the last half
--turns: of the cost, 5 if not given (1 with --quick).
--traces: a folder with gsm8k_test.jsonl, qmsum_test.jsonl (texts) and azure2023_code.csv (times); without it the texts
are made up and the trace is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import csv
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import emit, emit_machine

TTFT_LIMIT_S, TPOT_LIMIT_S = 1.0, 0.1
PARTS = ("load", "cost", "drops", "overload")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="few requests, for CI")
    parser.add_argument("--turns", type=int, help="of the cost")
    parser.add_argument("--model", help="a folder or Hub id; the embedded model if not given")
    parser.add_argument("--traces", type=Path, default=Path(__file__).parent.parent.parent / "shared/traces")
    parser.add_argument(
        "--engine", action="store_true", help=argparse.SUPPRESS
    )  # the process of the engine alone
    arguments = parser.parse_args()
    if arguments.engine:
        engine_alone(arguments.model)
        return
    emit_machine()
    texts = Texts(arguments.traces)
    for part in arguments.part or PARTS:
        asyncio.run(globals()[part](arguments, texts))


# -- requests ------------------------------------------------------------------------------------------


class Texts:
    """Prompts as people write them: a question behind shared examples, or behind a stretch of a meeting."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            lines = (folder / "gsm8k_test.jsonl").read_text().splitlines()
            self._questions = [
                f"Q: {one['question']}\nA: {one['answer']}\n" for one in map(json.loads, lines)
            ]
            lines = (folder / "qmsum_test.jsonl").read_text().splitlines()
            self._meetings = [
                "".join(f"{turn['speaker']}: {turn['content']}\n" for turn in one["meeting_transcripts"])
                for one in map(json.loads, lines)
            ]
            self.are_real = True
        except OSError:
            draw = random.Random(0)
            words = [
                f"{a}{b}" for a in ("re", "un", "pre", "so") for b in ("do", "make", "turn", "call", "set")
            ]
            self._questions = [" ".join(draw.choices(words, k=40)) + "\n" for _ in range(200)]
            self._meetings = [" ".join(draw.choices(words, k=4000)) for _ in range(10)]
            self.are_real = False

    def prompt(self, draw: random.Random) -> str:
        if draw.random() < 0.7:
            return "".join(self._questions[:2]) + draw.choice(self._questions)
        return draw.choice(self._meetings)[:1200] + "\n" + draw.choice(self._questions[:50])


@dataclass
class Outcome:
    """The result of one request, with times from its start."""

    status: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def per_token_s(self) -> float:
        return (self.total_s - self.first_s) / max(1, self.num_tokens - 1)


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: " + str(len(content)).encode() + b"\r\n\r\n" + content
    )


async def ask(port: int, body: dict[str, Any]) -> Outcome:
    """One request on its own connection; a client in a few lines, so that it does not use up the server's core."""
    outcome, began = Outcome(), time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(body))
        outcome.status = int((await reader.readline()).split()[1])
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter() - began
            if b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
                outcome.num_tokens = usage["completion_tokens"]
                outcome.num_prompt_tokens = usage["prompt_tokens"]
                outcome.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            elif b'"error":{' in line:
                outcome.error = line.decode()
            else:
                outcome.first_s = outcome.first_s or now
                outcome.total_s = now
        writer.close()
        if outcome.status == 200 and not outcome.num_tokens:
            outcome.error = outcome.error or "the answer ended early"
    except OSError as error:
        outcome.error = str(error)
    return outcome


# -- processes -----------------------------------------------------------------------------------------


class Server:
    """A running `quire serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        self.log = ""
        for line in process.stderr:
            self.log += line
            if found := re.search(r" on http://[^:]+:(\d+) ", line):
                self.port = int(found[1])
                return
        raise SystemExit(self.log)

    def cpu_s(self) -> float:
        """CPU time of all its threads. Threads that have ended meanwhile are left out; there are hardly any."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _page(self, path: str, times: int = 3) -> str:
        """A full server closes a connection that waits; it is asked again then."""
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}").read().decode()
        except ConnectionError:
            if times == 1:
                raise
            time.sleep(0.2)
            return self._page(path, times - 1)

    def metric(self, name: str) -> float:
        page = self._page("/metrics")
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        assert found, name
        return sum(map(float, found))


@contextmanager
def serving(model: str | None, *, kv_memory: str = "1GiB", **server_settings: Any) -> Iterator[Server]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("[server]\n" + "".join(f"{name} = {value}\n" for name, value in server_settings.items()))
        file.flush()
        command = [sys.executable, "-m", "quire", "serve", *([model] if model else [])]
        process = subprocess.Popen(
            [*command, "--port", "0", "--kv-memory", kv_memory, "--config", file.name],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield Server(process)
        finally:
            process.terminate()
            process.wait(60)


def engine_alone(model: str | None) -> None:
    """Answers each line of stdin, {"prompts", "max_tokens"}, with {"seconds", "cpu_s", "num_tokens"}."""
    from quire import LLM, SamplingParams

    with LLM(model, kv_memory="1GiB") as llm:
        for line in sys.stdin:
            given = json.loads(line)
            params = SamplingParams(max_tokens=given["max_tokens"], temperature=0, ignore_eos=True)
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            outputs = llm.generate(given["prompts"], params)
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "num_tokens": num_tokens}), flush=True)


# -- parts ---------------------------------------------------------------------------------------------


async def load(arguments: argparse.Namespace, texts: Texts) -> None:
    draw = random.Random(1)
    num_requests, rate = (60, 20.0) if arguments.quick else (600, 20.0)
    with serving(arguments.model) as server:
        await ask(server.port, {"prompt": "a", "max_tokens": 2})
        bodies = [_body(texts, draw) for _ in range(64)]
        _emit_load("64 at once", await asyncio.gather(*[ask(server.port, body) for body in bodies]), texts)
        gaps = [draw.expovariate(rate) for _ in range(num_requests)]
        _emit_load("poisson", await _open_loop(server.port, _times(gaps), texts, draw), texts, rate=rate)
        trace = arguments.traces / "azure2023_code.csv"
        if trace.exists():
            stamps = [_ticks(row["TIMESTAMP"]) for row in csv.DictReader(trace.open())][: num_requests + 1]
            # As bursty as they came, as many a second as above.
            scale = num_requests / rate / (stamps[-1] - stamps[0])
            times = [(stamp - stamps[0]) * scale for stamp in stamps[1:]]
            _emit_load("azure code", await _open_loop(server.port, times, texts, draw), texts, rate=rate)


async def cost(arguments: argparse.Namespace, texts: Texts) -> None:
    draw = random.Random(2)
    batch, new, turns = (16, 32, 1) if arguments.quick else (32, 128, 5)
    turns = arguments.turns or turns
    prompt = [text[:600] for text in (texts.prompt(draw) for _ in range(batch))]
    command = [sys.executable, __file__, "--engine"] + (
        ["--model", arguments.model] if arguments.model else []
    )
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None
    assert engine.stdout is not None
    alone, served = [], []
    with serving(arguments.model) as server:
        for turn in range(turns + 1):  # the first warms up
            print(json.dumps({"prompts": prompt, "max_tokens": new}), file=engine.stdin, flush=True)
            one = json.loads(engine.stdout.readline())
            before, began = server.cpu_s(), time.perf_counter()
            bodies = [{"prompt": p, "max_tokens": new, "temperature": 0, "ignore_eos": True} for p in prompt]
            outcomes = await asyncio.gather(*[ask(server.port, body) for body in bodies])
            seconds, cpu_s = time.perf_counter() - began, server.cpu_s() - before
            assert all(outcome.status == 200 and outcome.error is None for outcome in outcomes), outcomes
            num_tokens = sum(outcome.num_tokens for outcome in outcomes)
            assert num_tokens == one["num_tokens"]
            if turn:
                alone.append(one)
                served.append({"seconds": seconds, "cpu_s": cpu_s, "num_tokens": num_tokens})
    engine.stdin.close()
    engine.wait()
    emit(
        "serving",
        part="cost",
        requests=batch,
        new_tokens=new,
        turns=turns,
        own_cpu_us_per_token=_median(
            1e6 * (s["cpu_s"] - a["cpu_s"]) / s["num_tokens"] for a, s in _pairs(alone, served)
        ),
        served_cpu_us_per_token=_median(1e6 * s["cpu_s"] / s["num_tokens"] for s in served),
        engine_cpu_us_per_token=_median(1e6 * a["cpu_s"] / a["num_tokens"] for a in alone),
        served_tokens_per_s=_median(s["num_tokens"] / s["seconds"] for s in served),
        engine_tokens_per_s=_median(a["num_tokens"] / a["seconds"] for a in alone),
        share_of_engine=_median(a["seconds"] / s["seconds"] for a, s in _pairs(alone, served)),
    )  # fmt: skip


async def drops(arguments: argparse.Namespace, texts: Texts) -> None:
    num, at_once, draw = 300 if arguments.quick else 10_000, 64, random.Random(3)
    ends: collections.Counter[str] = collections.Counter()

    async def drop(port: int) -> None:
        data = request_bytes({**_body(texts, draw), "max_tokens": 200})
        kind = draw.choice(["connected", "sent part", "sent all", "read part", "read part"])
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if kind != "connected":
                writer.write(data[: draw.randrange(1, len(data))] if kind == "sent part" else data)
                await writer.drain()
            if kind == "read part":
                await reader.read(draw.randrange(1, 4000))
            elif draw.random() < 0.5:
                await asyncio.sleep(draw.random() * 0.02)
            writer.transport.abort() if draw.random() < 0.5 else writer.close()
            ends[kind] += 1
        except OSError as error:
            ends[type(error).__name__] += 1

    async def several(port: int, count: int) -> None:
        for _ in range(count):
            await drop(port)

    # Little memory: the cache soon has all of it, and later growth is something else.
    with serving(arguments.model, kv_memory="128MiB") as server:
        await several(server.port, num // 20)
        began, before = time.perf_counter(), server.resident_bytes()
        await asyncio.gather(*[several(server.port, num // at_once + 1) for _ in range(at_once)])
        seconds, ended = time.perf_counter() - began, time.perf_counter()
        while (held := server.metric("quire:held_blocks")) and time.perf_counter() < ended + 10:
            await asyncio.sleep(0.02)
        emit(
            "serving",
            part="drops",
            connections=sum(ends.values()),
            seconds=seconds,
            ends=dict(ends),
            held_blocks=held,
            free_after_s=time.perf_counter() - ended,
            resident_mib_grown=(server.resident_bytes() - before) / 2**20,
            still_answers=(await ask(server.port, {"prompt": "a", "max_tokens": 2})).status,
        )
        assert not held, "no request holds blocks"


async def overload(arguments: argparse.Namespace, texts: Texts) -> None:
    draw, seconds = random.Random(4), 4.0 if arguments.quick else 120.0
    with serving(arguments.model, kv_memory="128MiB", max_waiting=64) as server:
        bodies = [_body(texts, draw) for _ in range(64)]
        began = time.perf_counter()
        await asyncio.gather(*[ask(server.port, body) for body in bodies])
        rate = 8 * 64 / (time.perf_counter() - began)
        times = _times([draw.expovariate(rate) for _ in range(int(rate * seconds))])
        looks: list[tuple[int, float]] = []  # requests that have come, MiB

        async def look() -> None:
            began = time.perf_counter()
            for eighth in range(1, 9):
                await asyncio.sleep(max(0.0, began + seconds * eighth / 8 - time.perf_counter()))
                kv_bytes = await asyncio.to_thread(server.metric, "quire:kv_committed_bytes")
                num_come = sum(at <= time.perf_counter() - began for at in times)
                looks.append((num_come, (server.resident_bytes() - kv_bytes) / 2**20))

        looking = asyncio.create_task(look())
        outcomes = await _open_loop(server.port, times, texts, draw)
        await looking
        statuses = collections.Counter(outcome.status for outcome in outcomes)
        (middle, half_mib), (end, end_mib) = looks[3], looks[-1]
        # None where a short run's first half was seen so late that all had come.
        grown = round(1e4 * (end_mib - half_mib) / (end - middle), 2) if end > middle else None
        emit(
            "serving",
            part="overload",
            requests=len(outcomes),
            rate=rate,
            statuses=dict(statuses),
            errors=sum(outcome.error is not None for outcome in outcomes),
            seconds=seconds,
            resident_mib_without_kv=[round(mib, 1) for _, mib in looks],
            grown_mib_per_10k_requests=grown,
            evicted_blocks=server.metric("quire:evicted_blocks_total"),
            held_blocks=server.metric("quire:held_blocks"),
        )
        assert set(statuses) <= {200, 429}, statuses


def _body(texts: Texts, draw: random.Random) -> dict[str, Any]:
    return {
        "prompt": texts.prompt(draw),
        "max_tokens": draw.randint(8, 64),
        "ignore_eos": True,
        "temperature": 0,
    }


async def _open_loop(port: int, times: Sequence[float], texts: Texts, draw: random.Random) -> list[Outcome]:
    """A request at each of these times, in seconds from now, independent of the earlier requests."""
    began, tasks = time.perf_counter(), []
    for at in times:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
        tasks.append(asyncio.create_task(ask(port, _body(texts, draw))))
    return await asyncio.gather(*tasks)


def _emit_load(case: str, outcomes: Sequence[Outcome], texts: Texts, **more: Any) -> None:
    good = [one for one in outcomes if one.status == 200 and one.error is None]
    in_time = [one for one in good if one.first_s <= TTFT_LIMIT_S and one.per_token_s <= TPOT_LIMIT_S]
    emit(
        "serving",
        part="load",
        case=case,
        real_text=texts.are_real,
        requests=len(outcomes),
        **more,
        errors=len(outcomes) - len(good),
        first_token_ms=_percentiles([1e3 * one.first_s for one in good]),
        per_token_ms=_percentiles([1e3 * one.per_token_s for one in good]),
        goodput=len(in_time) / len(outcomes),
        hit_rate=sum(one.num_cached_tokens for one in good) / sum(one.num_prompt_tokens for one in good),
    )
    assert len(good) == len(outcomes), next(one for one in outcomes if one not in good)


def _percentiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {f"p{p}": round(values[min(len(values) - 1, len(values) * p // 100)], 2) for p in (50, 95, 99)}


def _times(gaps: Sequence[float]) -> list[float]:
    total, times = 0.0, []
    for gap in gaps:
        total += gap
        times.append(total)
    return times


def _ticks(stamp: str) -> float:
    """Seconds of the day of "2023-11-16 18:17:03.9799600"."""
    hours, minutes, seconds = stamp.split()[1].split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds)


def _pairs(alone: list[Any], served: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(alone, served, strict=True)


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)


if __name__ == "__main__":
    main()
