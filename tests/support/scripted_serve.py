"""`quire serve` with a scripted model; it records every request with its answer.

    python tests/support/scripted_serve.py SCRIPT RECORD [ARGUMENTS of quire serve]

SCRIPT: a JSON file `{"answers": {marker: [[token, ...], ...]}, "tool": text, "else": [token, ...]}`. The last marker in
a prompt selects the turn: its first request gets the first answer, and so on. A prompt without a marker or without the
text `tool` (a title, a summary), or after the last answer, gets "else". RECORD gets a JSON line a request: path,
headers, body, status, answer.

Only the logits are changed, after the model's forward: the scripted token gets the largest. Prefill, cache, scheduler,
sampler, detokenizer and HTTP are those of every server.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from quire.cli.main import main
from quire.engine import runner
from quire.scheduler.request import Request
from quire.server import run
from quire.step import Batch

LEAD = 50.0  # by which the due logit is beyond the others: nothing that a client asks for draws another


class Script:
    """Which token comes next in each sequence."""

    def __init__(self, script: dict[str, Any], tokenizer: Any = None) -> None:
        self._answers: dict[str, list[list[int]]] = script["answers"]
        self._tool: str = script["tool"]
        self._else: list[int] = script["else"]
        self._marker = re.compile("|".join(map(re.escape, self._answers)) or "(?!)")
        self._num_asked: dict[str, int] = {}
        self._of: dict[str, list[int]] = {}
        self.tokenizer = tokenizer

    def token(self, request: Request, position: int) -> int | None:
        """Of a request's answer; None behind its end, where the model speaks for itself."""
        if request.request_id not in self._of:
            self._of[request.request_id] = self._answer(self.tokenizer.decode(request.prompt_token_ids))
        answer = self._of[request.request_id]
        return answer[position] if position < len(answer) else None

    def _answer(self, prompt: str) -> list[int]:
        markers = self._marker.findall(prompt)
        if not markers or self._tool not in prompt:
            return self._else
        number = self._num_asked.get(markers[-1], 0)
        self._num_asked[markers[-1]] = number + 1
        answers = self._answers[markers[-1]]
        return answers[number] if number < len(answers) else self._else


def runner_of(script: Script) -> type[runner.Runner]:
    """A runner whose logits follow the script."""

    class ScriptedRunner(runner.Runner):
        def run(self, step: Batch) -> torch.Tensor:
            logits = super().run(step)
            for sequence, row in zip(step.sampled, step.draw_rows.tolist(), strict=True):
                token = script.token(sequence.request, len(sequence.output_ids))
                if token is not None:
                    logits[row, token] = logits[row].max() + LEAD
            return logits

    return ScriptedRunner


class Recorder:
    """ASGI: writes down what comes and what goes, once both have ended."""

    def __init__(self, app: Any, path: Path) -> None:
        self._app = app
        self._path = path
        self._lock = threading.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body, answer = bytearray(), bytearray()
        status = None

        async def received() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            line = {
                "method": scope["method"],
                "path": scope["path"],
                "headers": {key.decode(): value.decode() for key, value in scope["headers"]},
                "body": body.decode(errors="replace"),
                "status": status,
                "answer": answer.decode(errors="replace"),
            }
            with self._lock, self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def scripted(script: Script, record: Path) -> None:
    """*changes:* this process's engine and server, for good."""
    made = run.create_app

    def create_app(engine: Any, settings: Any) -> Any:
        script.tokenizer = engine.tokenizer
        app = made(engine, settings)
        app.add_middleware(Recorder, path=record)
        return app

    run.create_app = create_app
    runner.Runner = runner_of(script)  # type: ignore[misc]


if __name__ == "__main__":
    scripted(Script(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
    sys.argv[1:] = ["serve", *sys.argv[3:]]
    main()
