"""Runs coding agents, unchanged and of exact versions, in sessions with a `quire serve` whose model gives scripted
answers.

    python tests/support/agents_soak.py DIR [--agents NAME ...] [--families NAME ...] [--sessions 20] [--keep FILE]
    python tests/support/agents_soak.py DIR --real [MODEL] [--agents NAME ...]

DIR: for the servers' models and the agents' homes. Each agent has `--sessions` sessions of three turns, spread over the
families of models; a family is a tokenizer, a chat template and a tiny random model. A JSON line a session: its calls,
the share of the second and third turn's prompts that came from the cache, and its faults; then a line an agent. Fails
if there is a fault. QUIRE_AGENTS: the folder the agents are installed in, from npm, if they are not there. --keep: a
file that gets every request with its answer. --real: one session of each agent with a trained model and its own
answers: the model of the extra `real`, or MODEL. Its answers are short.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import families
from support.agents_script import THOUGHT, Answer, Turn, session, tokens
from support.chat_stream import Streamed, streamed
from support.checkpoints import GEMMA, assemble_gemma
from support.coding_agents import AGENTS, CONTEXT, Agent, Modules, install, lacking
from support.serve_process import serving
from support.until import until

from quire.server.anthropic.messages_bodies import MessagesRequest
from quire.server.anthropic.messages_prompt import chat_of_messages
from quire.server.messages import render
from quire.server.outputs.tool_call_format import template_text
from quire.server.schemas.chat_bodies import ChatRequest
from quire.server.settings import ServerLimits

SCRIPTED = Path(__file__).with_name("scripted_serve.py")
FAMILIES = ["qwen2.5", "qwen3", "qwen3-coder", "mistral13", "deepseek3.1"]
LEAST_CACHED = 0.95  # of a later turn's first prompt
MODEL = "scripted"
REAL_QUESTIONS = ("Which files are here?", "Write a line into notes.txt.", "Say what you have done.")
REAL_OUTPUT, REAL_TURN_LIMIT_S = 96, 1800.0


@dataclass
class Found:
    """What one session has shown."""

    num_calls: int = 0
    cached: list[float] = field(default_factory=list)  # the share of each later turn's first prompt
    leaves: list[str] = field(default_factory=list)  # where that prompt leaves the one before it
    faults: list[str] = field(default_factory=list)


Request = dict[str, Any]  # a line of the record, its body read


class Record:
    """The requests that the server has written down, in their order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def of(self, marker: str) -> list[dict[str, Any]]:
        """Those of the turn with this marker: its newest question is in them, and the script's tools are."""
        found: list[dict[str, Any]] = []
        for one in self.all():
            body = json.loads(one["body"] or "null")
            if body and one["path"].endswith("/messages"):
                chat = chat_of_messages(MessagesRequest.model_validate(body), None).chat
                body = chat.model_dump(exclude_none=True)
            if body and body.get("tools") and marker in _text(_last_question(body)):
                found.append({**one, "body": body})
        return found


def _last_question(body: dict[str, Any]) -> Any:
    return [one for one in body["messages"] if one["role"] == "user"][-1]["content"]


def _text(content: Any) -> str:
    """A message's, whether it comes whole, in parts or not at all."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def check_turn(
    agent: Agent, turn: Turn, folder: Path, requests: list[Request], found: Found, *, thinks: bool
) -> None:
    """Adds to `found` what the turn's requests and the session's folder have shown. thinks: the model does."""
    faults = found.faults
    if len(requests) != len(turn.answers):
        faults.append(f"expected {len(turn.answers)} requests, got {len(requests)}")
    for index, (request, answer) in enumerate(zip(requests, turn.answers, strict=False)):
        where = f"request {index + 1}"
        if request["status"] != 200:
            faults.append(f"{where}: status {request['status']}: {request['answer'][:500]}")
            continue
        try:
            got = streamed(request["answer"])
        except ValueError as error:
            faults.append(f"{where}: {error}")
            continue
        faults += [f"{where}: {fault}" for fault in unlike(agent, answer, got)]
        if got.reasoning.strip() != (THOUGHT if thinks else ""):
            faults.append(f"{where}: expected thoughts of a model that {thinks=}, got {got.reasoning!r}")
        found.num_calls += len(got.calls)
        if not answer.is_cut and index + 1 < len(requests):
            body = requests[index + 1]["body"]
            faults += [f"after {where}: {fault}" for fault in unlike_told(answer, got, body)]
    for name, content in turn.files.items():
        path = folder / name
        if not path.exists() or path.read_text() != content:
            faults.append(
                f"expected the file {name} as it was written, {'another' if path.exists() else 'none'}"
            )


def unlike(agent: Agent, answer: Answer, got: Streamed) -> Iterator[str]:
    """How an answer that was streamed differs from the script's."""
    if got.finish_reason != answer.finish_reason:
        yield f"expected the finish reason {answer.finish_reason}, got {got.finish_reason}"
    if answer.is_cut:
        return
    if got.content.strip() != answer.text.strip():
        yield f"expected the text {answer.text!r}, got {got.content!r}"
    calls = [agent.call(one.tool, one.arguments) for one in answer.calls]
    told = [{"name": one.name, "arguments": one.value} for one in got.calls]
    if told != calls:
        yield f"expected the calls {calls}, got {got.calls}"


def unlike_told(answer: Answer, got: Streamed, body: dict[str, Any]) -> Iterator[str]:
    """How the next request tells of this answer and of what its calls gave."""
    if not answer.calls:
        return
    ids = [one.id for one in got.calls]
    at = next(
        (
            index
            for index, one in enumerate(body["messages"])
            if [call["id"] for call in one.get("tool_calls") or []] == ids
        ),
        None,
    )
    if at is None:
        yield f"expected a message with the calls {ids}"
        return
    sent = body["messages"][at]
    if _text(sent.get("content")).strip() != got.content.strip():
        yield f"expected the text {got.content!r} told again, got {sent.get('content')!r}"
    for one, call in zip(got.calls, sent["tool_calls"], strict=True):
        if (call["function"]["name"], json.loads(call["function"]["arguments"])) != (one.name, one.value):
            yield f"expected the call {one} told again, got {call}"
    results = {
        one.get("tool_call_id"): _text(one.get("content"))
        for one in body["messages"][at + 1 : at + 1 + len(ids)]
        if one["role"] == "tool"
    }
    for key, call in zip(ids, answer.calls, strict=True):
        if key not in results:
            yield f"expected a result of the call {key} ({call.tool}), got those of {list(results)}"
        elif call.said not in results[key]:
            yield f"expected {call.said!r} in the result of {call.tool}, got {results[key]!r}"


def check_cached(
    agent: Agent, request: Request, before: list[Request], words: Any, found: Found, *, is_later_turn: bool
) -> None:
    """Adds to `found` how much of a request's prompt came from the cache. before: the session's so far.

    is_later_turn: the request is the first of a turn behind the first one.
    """
    try:
        got = streamed(request["answer"])
    except ValueError:
        return  # a fault already
    prompt = prompt_of(words, request["body"])
    if len(prompt) != got.num_prompt:
        found.faults.append(f"expected a prompt of {len(prompt)} tokens, got {got.num_prompt}")
    common = max((num_common(prompt, prompt_of(words, one["body"])) for one in before), default=0)
    if got.num_cached < min(common, len(prompt) - 1):
        found.faults.append(
            f"expected {common} tokens from the cache, an earlier prompt's, got {got.num_cached}"
        )
    if is_later_turn:
        found.cached.append(got.num_cached / got.num_prompt)
        found.leaves.append(difference(before[-1]["body"], request["body"]))
        if agent.keeps_prompts and found.cached[-1] < LEAST_CACHED:
            share = f"{got.num_cached} of {got.num_prompt} tokens"
            found.faults.append(
                f"{share} from the cache; its prompt leaves the one before at {found.leaves[-1]}"
            )


def prompt_of(words: Any, body: dict[str, Any]) -> np.ndarray:
    """The tokens of a request's prompt, as the server makes them."""
    asked = ChatRequest.model_validate(body)
    text = render(words, asked.messages, ServerLimits(), asked.tools or [])
    return np.array(words(text, add_special_tokens=False)["input_ids"], np.int64)


def num_common(one: np.ndarray, other: np.ndarray) -> int:
    """The tokens that both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Where a prompt leaves the one that came before it in its session."""
    for name in ("tools", "messages"):
        for index, pair in enumerate(zip(before.get(name) or [], after.get(name) or [], strict=False)):
            one, other = map(json.dumps, pair)
            if one != other:
                at = next(
                    at for at, letters in enumerate(zip(one, other, strict=False)) if len(set(letters)) > 1
                )
                one, other = (text[max(0, at - 60) : at + 90] for text in (one, other))
                return f"{name}[{index}]: {one!r}, then {other!r}"
    return "its end"


def run_session(agent: Agent, number: int, folder: Path, record: Record, words: Any) -> dict[str, Any]:
    folder.mkdir()
    found, turns = Found(), session(number, folder)
    thinks = "reasoning_content" in template_text(words)
    asked: list[Request] = []  # all of the session so far
    with agent.session(folder) as conversation:
        for index, turn in enumerate(turns):
            had = len(found.faults)
            try:
                conversation.ask(turn.asked)
                until(lambda turn=turn: len(record.of(turn.marker)) >= 1)
                requests = record.of(turn.marker)
                check_turn(agent, turn, folder, requests, found, thinks=thinks)
                for request in requests:
                    is_later_turn = bool(index) and request is requests[0]
                    check_cached(agent, request, asked, words, found, is_later_turn=is_later_turn)
                    asked.append(request)
            except RuntimeError as error:
                found.faults.append(str(error))
            found.faults[had:] = [f"turn {index + 1} ({turn.kind}): {fault}" for fault in found.faults[had:]]
    return {
        "agent": agent.name,
        "session": number,
        "kinds": [turn.kind for turn in turns],
        "requests": len(asked),
        "calls": found.num_calls,
        "cached": [round(share, 4) for share in found.cached],
        "leaves": found.leaves,
        "faults": found.faults,
    }


def run_agent(
    kind: type[Agent], family: str, numbers: list[int], modules: Modules, folder: Path, keep: Path | None
) -> Iterator[dict[str, Any]]:
    """The lines of these sessions, on a server of their own."""
    folder.mkdir(parents=True)
    words = families.tokenizer(family)
    families.model(family, max_positions=CONTEXT).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    answers = {
        turn.marker: [tokens(words, answer, kind.call) for answer in turn.answers]
        for number in numbers
        for turn in session(number, folder / f"session-{number}")
    }
    script, record = folder / "script.json", Record(folder / "record.jsonl")
    rest = tokens(words, Answer("Done."), kind.call)
    script.write_text(json.dumps({"answers": answers, "tool": kind.tools["write"], "else": rest}))
    served = [str(folder / "model"), "--kv-memory", "256MiB", "--served-model-name", MODEL]
    with serving(*served, program=[str(SCRIPTED), str(script), str(record.path)]) as server:
        agent = kind(modules, folder / "home", f"{server.url}/v1", MODEL)
        for number in numbers:
            yield {
                "family": family,
                **run_session(agent, number, folder / f"session-{number}", record, words),
            }
    others = [one for one in record.all() if one["status"] != 200]
    if others:
        faults = [f"{one['path']}: {one['status']} {one['answer'][:300]}" for one in others]
        yield {"family": family, "agent": kind.name, "faults": faults}
    if keep is not None:
        with keep.open("a") as file:
            file.write(record.path.read_text())


def run_real(kind: type[Agent], model: Path, modules: Modules, folder: Path) -> dict[str, Any]:
    """The line of one session with a model that speaks for itself: whatever it says, its answers are well formed."""
    (folder / "session").mkdir(parents=True)
    script, record, found = folder / "script.json", Record(folder / "record.jsonl"), Found()
    script.write_text(json.dumps({"answers": {}, "tool": "", "else": []}))
    served = [str(model), "--kv-memory", "2GiB", "--served-model-name", MODEL]
    with serving(*served, program=[str(SCRIPTED), str(script), str(record.path)]) as server:
        until(lambda: server.serves or server.process.poll() is not None, REAL_TURN_LIMIT_S)
        agent = kind(
            modules, folder / "home", f"{server.url}/v1", MODEL, 32768, REAL_OUTPUT, REAL_TURN_LIMIT_S
        )
        with agent.session(folder / "session") as conversation:
            for index, text in enumerate(REAL_QUESTIONS):
                num_before = len(record.all())
                try:
                    conversation.ask(text)
                except RuntimeError as error:
                    found.faults.append(f"turn {index + 1}: {error}")
                    break
                until(lambda before=num_before: len(record.all()) > before)
                check_real(agent, record.all()[num_before:], found, is_later_turn=bool(index))
    return {
        "agent": kind.name,
        "model": model.name,
        "requests": len(record.all()),
        "calls": found.num_calls,
        "cached": [round(share, 4) for share in found.cached],
        "faults": found.faults,
    }


def check_real(agent: Agent, lines: list[dict[str, Any]], found: Found, *, is_later_turn: bool) -> None:
    """Adds to `found` what the requests of one turn have shown."""
    shares: list[float] = []
    for one in lines:
        if one["status"] != 200:
            found.faults.append(f"status {one['status']}: {one['answer'][:500]}")
            continue
        try:
            got = streamed(one["answer"])
        except ValueError as error:
            found.faults.append(str(error))
            continue
        found.num_calls += len(got.calls)
        malformed = [call for call in got.calls if not isinstance(call.value, dict)]
        if malformed and got.finish_reason != "length":
            found.faults.append(f"expected calls whose arguments are objects, got {malformed}")
        if json.loads(one["body"]).get("tools"):
            shares.append(got.num_cached / got.num_prompt)
    if is_later_turn and shares:
        found.cached.append(shares[0])
        if agent.keeps_prompts and shares[0] < LEAST_CACHED:
            found.faults.append(
                f"expected {LEAST_CACHED:.0%} of the prompt from the cache, got {shares[0]:.2%}"
            )


def summary(kind: type[Agent], lines: list[dict[str, Any]]) -> dict[str, Any]:
    cached = [share for line in lines for share in line.get("cached", [])]
    return {
        "agent": kind.name,
        "package": kind.package,
        "sessions": sum("session" in line for line in lines),
        "requests": sum(line.get("requests", 0) for line in lines),
        "calls": sum(line.get("calls", 0) for line in lines),
        "least cached": round(min(cached, default=0), 4),
        "median cached": round(median(cached), 4) if cached else 0,
        "faults": sum(len(line["faults"]) for line in lines),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak agents")
    parser.add_argument("folder", type=Path)
    names = [kind.name for kind in AGENTS]
    parser.add_argument("--agents", nargs="+", default=names, choices=names)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=list(families.FAMILIES))
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--real", nargs="?", type=Path, const=GEMMA)
    asked = parser.parse_args()
    if (reason := lacking()) is not None:
        print(json.dumps({"skipped": reason}))
        return 0
    modules = install(Path(os.environ.get("QUIRE_AGENTS") or "build/agents").resolve())
    kinds = [one for one in AGENTS if one.name in asked.agents]
    if asked.real is not None:
        model = assemble_gemma(asked.folder) if asked.real == GEMMA else asked.real
        lines = [run_real(kind, model, modules, asked.folder.resolve() / kind.name) for kind in kinds]
        print(*map(json.dumps, lines), sep="\n", flush=True)
        return 1 if any(line["faults"] for line in lines) else 0
    failed = 0
    for kind in kinds:
        lines = []
        for index, family in enumerate(asked.families):
            numbers = list(range(asked.sessions))[index :: len(asked.families)]
            folder = asked.folder.resolve() / kind.name / family
            for line in run_agent(kind, family, numbers, modules, folder, asked.keep):
                print(json.dumps(line), flush=True)
                lines.append(line)
        print(json.dumps(summary(kind, lines)), flush=True)
        failed += sum(len(line["faults"]) for line in lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
