"""The second turn of a chat whose template drops the first answer's thoughts: prepared, not prepared, only grown.

    python benchmarks/next_turn.py [--quick] [--thoughts 1500] [--repetitions 5]

The embedded model behind `quire serve`'s application, on loopback; a regular expression forces the form of an answer:
thoughts, then a line. JSON lines: median and lowest time to the second turn's first token, and its computed tokens.
    grown          no thoughts: the second prompt goes on where the first answer ended
    not prepared   `prepare_next_turn=0`
    prepared       by default
    busy           tokens a second of four other streams meanwhile, prepared against not
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from machine import emit, emit_machine

from quire import LLM, AsyncEngine
from quire.server.app import create_app
from quire.server.run import ApiServer, bind, url_of
from quire.server.settings import ServerSettings

TEMPLATE = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last and message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@contextmanager
def served(llm: LLM, settings: ServerSettings) -> Iterator[tuple[str, Any]]:
    listener = bind("127.0.0.1", 0)
    app = create_app(AsyncEngine(llm), settings)
    server = ApiServer(app, settings.limits, settings.proxies)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield url_of("127.0.0.1", listener.getsockname()[1]), app.state.service
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def ask(url: str, body: dict[str, Any]) -> tuple[float, str, str, int]:
    """Seconds to the first token, the answer's content and thoughts, and the computed tokens of the prompt."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    first, content, thoughts, computed = 0.0, "", "", 0
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if (usage := event.get("usage")) is not None:
                computed = usage["prompt_tokens_details"]["computed_tokens"]
            for choice in event["choices"]:
                delta = choice["delta"]
                content += delta.get("content") or ""
                thoughts += delta.get("reasoning_content") or ""
                if not first and (content or thoughts):
                    first = time.perf_counter() - began
    return first, content, thoughts, computed


def second_turn(url: str, service: Any, name: str, thoughts: int) -> tuple[float, int]:
    form = f"<think>[a-z ]{{{thoughts}}}</think>[a-z ]{{40}}" if thoughts else "[a-z ]{40}"
    messages = [{"role": "user", "content": f"{name}: tell me about it. " * 40}]
    first = {"messages": messages, "session_id": name, "max_tokens": thoughts + 200, "guided_regex": form}
    _, content, thought, _ = ask(url, first)
    assert bool(thought) == bool(thoughts), (content, thought)
    while not service.next_turns.is_done:
        time.sleep(0.005)
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And now?"}]
    seconds, _, _, computed = ask(url, {"messages": messages, "max_tokens": 2})
    return seconds, computed


def busy_rate(url: str, num_turns: int, prepares: bool) -> float:
    """Tokens a second of four streams while sessions end turns beside them."""
    total, ended = [0], threading.Event()

    def stream(number: int) -> None:
        while not ended.is_set():
            body = {
                "messages": [{"role": "user", "content": f"stream {number}"}],
                "max_tokens": 100,
                "ignore_eos": True,
            }
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
            total[0] += answer["usage"]["completion_tokens"]

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for turn in range(num_turns):
        body = {
            "messages": [{"role": "user", "content": f"turn {turn}"}],
            "max_tokens": 40,
            "ignore_eos": True,
        }
        httpx.post(
            f"{url}/v1/chat/completions",
            json=body | ({"session_id": "busy"} if prepares else {}),
            timeout=300,
        )
    ended.set()
    for thread in threads:
        thread.join()
    return total[0] / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short thoughts, two rounds: under 30 s")
    parser.add_argument("--thoughts", type=int, default=None, help="characters")
    parser.add_argument("--repetitions", type=int, default=None)
    arguments = parser.parse_args()
    emit_machine()
    thoughts = arguments.thoughts or (200 if arguments.quick else 1500)
    repetitions = arguments.repetitions or (2 if arguments.quick else 5)
    cases: dict[str, list[tuple[float, int]]] = {"grown": [], "not prepared": [], "prepared": []}
    rates: dict[bool, list[float]] = {True: [], False: []}
    with LLM(kv_memory="256MiB") as llm:
        llm.tokenizer.chat_template = TEMPLATE
        with served(llm, ServerSettings()) as (url, service):
            for number in range(repetitions + 1):  # the first round warms up
                for case, found in cases.items():
                    service.next_turns.max_tokens = 0 if case == "not prepared" else 4096
                    one = second_turn(url, service, f"{case} {number}", 0 if case == "grown" else thoughts)
                    if number:
                        found.append(one)
            service.next_turns.max_tokens = 4096
            for _ in range(repetitions):
                for prepares in (False, True):
                    rates[prepares].append(busy_rate(url, 3 if arguments.quick else 10, prepares))
    grown = statistics.median(seconds for seconds, _ in cases["grown"])
    for case, found in cases.items():
        times = [seconds for seconds, _ in found]
        median = statistics.median(times)
        emit(
            "next_turn",
            case=case,
            thoughts=0 if case == "grown" else thoughts,
            first_token_ms=round(1e3 * median, 1),
            lowest_ms=round(1e3 * min(times), 1),
            of_grown=round(median / grown, 2),
            computed=round(statistics.median(computed for _, computed in found)),
        )
    ratio = statistics.median(one / other for one, other in zip(rates[True], rates[False], strict=True))
    emit(
        "next_turn",
        case="busy",
        tokens_per_second=round(statistics.median(rates[True])),
        of_not_prepared=round(ratio, 3),
    )


if __name__ == "__main__":
    main()
