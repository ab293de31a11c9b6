"""A server process, an attacking client and a small client: measures the small client's waits and the memory.

    python tests/support/hostile_soak.py [--seconds 10] [--only ATTACK] [--keyless] [--one-address]

Each attack is made for some seconds by a process of its own, under an address and a key of its own. --keyless: the
server has no keys, so that only the address identifies a client. --one-address: the attack comes from the small
client's address, which has no guarantee then if it has no key. Meanwhile the small client repeatedly requests /health
and a completion of two tokens. A JSON line an attack: its statuses, the small client's longest wait, the server's
memory before, at its peak, after. Fails if a wait is a second or more, an answer is not a 200, or memory does not come
back.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import multiprocessing
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.serve_process import ServeProcess, serving

MOST_WAIT_S = 1.0
MOST_LEFT_BYTES = 128 << 20  # above what it was: the allocator's own
ATTACKER = "127.0.0.2"  # another address of this machine
CONFIG = """
[[tenants]]
name = "attacker"
keys = ["attacker"]
[[tenants]]
name = "other"
keys = ["other"]
"""
SHORT = {"prompt": "def f(", "max_tokens": 2, "temperature": 0}
MANY = "[" + "{}," * 700_000 + "{}]"


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


# -- attacks: each a coroutine that makes one attempt, and returns a status or a word -----------------------

Attempt = Callable[[httpx.AsyncClient, str], Any]


def posts(path: str, body: str | bytes, headers: dict[str, str] | None = None) -> Attempt:
    async def attempt(client: httpx.AsyncClient, url: str) -> Any:
        answer = await client.post(
            f"{url}{path}", content=body, headers={"Content-Type": "application/json", **(headers or {})}
        )
        return answer.status_code

    return attempt


def connects(data: bytes, repeats: int = 1, *, reads: bool = False) -> Attempt:
    """Sends over a connection of its own and leaves it open, for as long as the process lives."""
    kept: list[Any] = []

    async def attempt(client: httpx.AsyncClient, url: str) -> Any:
        parts = urlsplit(url)
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        own.bind((ATTACKER, 0))
        own.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(own, (parts.hostname, parts.port))
        kept.append(own)
        try:
            for _ in range(repeats):
                await asyncio.wait_for(loop.sock_sendall(own, data), 5)
        except OSError:
            return "closed"
        except TimeoutError:
            return "not read"
        if reads:
            answer = await asyncio.wait_for(loop.sock_recv(own, 65536), 10)
            return int(answer.split(b" ", 2)[1]) if answer else "closed"
        return "open"

    return attempt


def _chat(**more: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **more})


def _message(content: str) -> str:
    return '{"max_tokens":1,"messages":' + content + "}"


_CALL = {"function": {"name": "f", "arguments": "[" * 100_000}}
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Api-Key: attacker\r\nContent-Type: application/json\r\n"
_STREAM = json.dumps(
    {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True, "logprobs": 5}
).encode()

_UNREAD = "answers that nobody reads"
_STREAMS = "a flood of streams"
_MOST_ATTEMPTS = 3000  # connections that are kept open by one process
_MOST_STREAMS = 16
ATTACKS: dict[str, tuple[Attempt, int]] = {  # and how many attempts at once
    "prompts of objects": (posts("/v1/completions", f'{{"prompt":{MANY}}}'), 4),
    "messages of objects": (posts("/v1/chat/completions", _message(MANY)), 4),
    "content of objects": (
        posts("/v1/chat/completions", _message(f'[{{"role":"user","content":{MANY}}}]')),
        4,
    ),
    "stops of objects": (posts("/v1/completions", f'{{"prompt":"a","stop":{MANY}}}'), 4),
    "tokenize objects": (posts("/tokenize", f'{{"messages":{MANY}}}'), 4),
    "conversations of objects": (posts("/quire/conversations", f'{{"tokens":{MANY}}}'), 4),
    "just few enough objects": (posts("/v1/completions", '{"prompt":[' + "{}," * 58_000 + "{}]}"), 4),
    "just few enough names": (
        posts(
            "/v1/completions",
            '{"prompt":"a","x":{' + ",".join(f'"{name:x}":1' for name in range(30_000)) + "}}",
        ),
        4,
    ),
    "a field nobody knows": (posts("/v1/completions", f'{{"prompt":"a","x":{MANY}}}'), 4),
    "numbers": (posts("/v1/completions", '{"prompt":[' + "1.5," * 4_000_000 + "1]}"), 4),
    "a long text": (posts("/v1/completions", json.dumps({"prompt": "blue " * 3_000_000})), 4),
    "a text to tokenize": (posts("/tokenize", json.dumps({"prompt": "blue " * 50_000})), 4),
    "a long chat": (
        posts(
            "/v1/chat/completions",
            _message("[" + ",".join(['{"role":"user","content":"' + "blue " * 700 + '"}'] * 4096) + "]"),
        ),
        4,
    ),
    "half a pair": (posts("/v1/completions", '{"prompt":"\\ud800","user":"' + "x" * 15_000_000 + '"}'), 4),
    "brackets": (posts("/v1/completions", "[" * 15_000_000), 4),
    "arguments of brackets": (
        posts("/v1/chat/completions", _chat(messages=[{"role": "assistant", "tool_calls": [_CALL]}])),
        4,
    ),
    "biases": (
        posts(
            "/v1/completions", json.dumps({**SHORT, "logit_bias": {str(name): "x" for name in range(30_000)}})
        ),
        4,
    ),
    "a large schema": (
        posts("/v1/completions", json.dumps({**SHORT, "json_schema": {"enum": list(range(300_000))}})),
        4,
    ),
    "many answers": (posts("/v1/completions", json.dumps({**SHORT, "prompt": ["a"] * 64, "n": 16})), 4),
    "headers without end": (connects(b"A: " + b"b" * 100_000 + b"\r\n", 100), 8),
    "an address without end": (connects(b"GET /" + b"a" * 100_000, 100), 8),
    "halves of headers": (connects(_HEAD), 64),
    "halves of bodies": (connects(_HEAD + b"Content-Length: 10000000\r\n\r\n" + b" " * 60_000), 64),
    _UNREAD: (
        connects(_HEAD + b"Content-Length: %d\r\n\r\n" % len(_STREAM) + _STREAM),
        4,
    ),
    _STREAMS: (connects(_HEAD + b"Content-Length: %d\r\n\r\n" % len(_STREAM) + _STREAM), 64),
    "whole, cheap requests": (connects(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 20), 64),
    "conversations that are kept": (
        posts(
            "/quire/conversations",
            json.dumps({"messages": [{"role": "user", "content": "a", "name": "b" * 1_000_000}]}),
        ),
        4,
    ),
}


async def _attack(name: str, url: str, seconds: float) -> collections.Counter[str]:
    attempt, at_once = ATTACKS[name]
    found: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + seconds
    most = _MOST_STREAMS if name == _UNREAD else _MOST_ATTEMPTS

    async def again(client: httpx.AsyncClient) -> None:
        while time.monotonic() < end and found.total() < most:
            try:
                found[str(await attempt(client, url))] += 1
            except (httpx.HTTPError, OSError, TimeoutError) as error:
                found[type(error).__name__] += 1

    transport = httpx.AsyncHTTPTransport(local_address=ATTACKER, limits=httpx.Limits(max_connections=None))
    headers = {"Authorization": "Bearer attacker"}
    async with httpx.AsyncClient(timeout=60, transport=transport, headers=headers) as client:
        await asyncio.gather(*[again(client) for _ in range(at_once)])
        await asyncio.sleep(max(0.0, end - time.monotonic()))
    return found


def _attacker(name: str, url: str, seconds: float, told: Any) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))
    told.send(dict(asyncio.run(_attack(name, url, seconds))))


def under_attack(name: str, url: str, pid: int, seconds: float, client: httpx.Client) -> dict[str, Any]:
    """One attack's line, and whether the other client fared well."""
    before = peak = rss(pid)
    here, there = multiprocessing.Pipe()
    attacker = multiprocessing.Process(target=_attacker, args=(name, url, seconds, there), daemon=True)
    attacker.start()
    waits: dict[str, float] = {"health": 0.0, "completion": 0.0}
    wrong: list[str] = []
    num_asked = 0
    while attacker.is_alive() and not here.poll():
        for kind in waits:
            began = time.monotonic()
            try:
                if kind == "health":
                    answer = client.get(f"{url}/health")
                else:
                    answer = client.post(f"{url}/v1/completions", json=SHORT)
                if answer.status_code != 200:
                    wrong.append(f"{kind}: {answer.status_code}")
            except httpx.HTTPError as error:
                wrong.append(f"{kind}: {type(error).__name__}")
            waits[kind] = max(waits[kind], time.monotonic() - began)
            num_asked += 1
        peak = max(peak, rss(pid))
        time.sleep(0.02)
    statuses = here.recv()
    attacker.join(30)
    end = time.monotonic() + 20
    while rss(pid) - before > MOST_LEFT_BYTES and time.monotonic() < end:
        time.sleep(0.2)
    after = rss(pid)
    is_well = max(waits.values()) < MOST_WAIT_S and not wrong and after - before <= MOST_LEFT_BYTES
    return {
        "attack": name,
        "attempts": statuses,
        "longest_wait_s": {kind: round(wait, 3) for kind, wait in waits.items()},
        "num_asked": num_asked,
        "wrong": wrong[:5],
        "mib": {"before": before >> 20, "peak": peak >> 20, "after": after >> 20},
        "ok": is_well,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=sorted(ATTACKS))
    parser.add_argument("--keyless", action="store_true")
    parser.add_argument("--one-address", action="store_true")
    asked = parser.parse_args()
    if asked.one_address:
        global ATTACKER
        ATTACKER = "127.0.0.1"
    names = [asked.only] if asked.only else list(ATTACKS)
    headers = {"Authorization": "Bearer other", "Connection": "close"}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write("" if asked.keyless else CONFIG)
        config.flush()
        with (
            serving("--kv-memory", "64MiB", "--config", config.name) as server,
            httpx.Client(timeout=60, headers=headers) as client,
        ):
            is_well = attack_all(names, server, client, asked.seconds)
    return 0 if is_well else 1


def attack_all(names: list[str], server: ServeProcess, client: httpx.Client, seconds: float) -> bool:
    """Prints a line each; whether all of them went well."""
    url, pid, is_well = server.url, server.process.pid, True
    for _ in range(20):  # what the first requests load is no growth
        client.post(f"{url}/v1/completions", json=SHORT)
    for name in names:
        line = under_attack(name, url, pid, seconds, client)
        print(json.dumps(line), flush=True)
        is_well = is_well and line["ok"]
    return is_well


if __name__ == "__main__":
    sys.exit(main())
