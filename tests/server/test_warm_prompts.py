"""`--warm FILE`: prompts that a server computes at its start; a first request for one finds it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import tiny_llm
from support.running_server import running

from quire.errors import ArgumentError
from quire.server.api_keys import ANYBODY, ApiTenant
from quire.server.settings import ServerSettings
from quire.server.warm_prompts import read_warm_prompts

CHAT = {"messages": [{"role": "system", "content": "You are brief, and you never say more than one word."}]}
TEXT = "Once upon a time there was a fox that had never seen a dog."


def write(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "warm.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_first_requests_find_their_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, CHAT, "", {"prompt": [TEXT, [7, 8, 9] * 20], "max_tokens": 5, "keep_for": 60})
    with tiny_llm.llm() as llm, running(llm, ServerSettings(warm=path)) as (url, app):
        service = app.state.service  # type: ignore[attr-defined]
        deadline = time.monotonic() + 30
        while len(llm.pins) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(llm.pins) == 2
        assert (
            service.engine.submit_between_steps(lambda: llm._opened.engine.stats()).result()[
                "num_prompt_tokens"
            ]
            == 0
        )
        chat = {"messages": [*CHAT["messages"], {"role": "user", "content": "Hello"}], "max_tokens": 1}
        usage = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= len(CHAT["messages"][0]["content"])
        for prompt in (TEXT, [7, 8, 9] * 20):
            usage = httpx.post(
                f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60
            ).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_a_prompt_that_cannot_be_computed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, {"prompt": [1] * 5000}, {"prompt": TEXT})
    with tiny_llm.llm() as llm, running(llm, ServerSettings(warm=path)):
        deadline = time.monotonic() + 30
        while (
            llm.cache.match(llm.tokenizer(TEXT)["input_ids"]).num_tokens == 0 and time.monotonic() < deadline
        ):
            time.sleep(0.01)
    assert any("line 1 of" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "a JSON object"),
        ("[1]", "messages or a prompt"),
        ({"input": "x"}, "messages or a prompt"),
        ({"prompt": "x", "tenant": "bob"}, "a tenant of the settings"),
        ({"prompt": "x", "temperature": 9}, "`temperature`"),
        ({**CHAT, "unknown": 1}, "`unknown`"),
        ({**CHAT, "session_cache": {"action": "hold"}}, "no session_cache"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(line: Any, told: str, tmp_path: Path) -> None:
    path = write(tmp_path, CHAT, line)
    with pytest.raises(ArgumentError, match="line 2 of") as raised:
        read_warm_prompts(path, [ANYBODY, ApiTenant("alice")])
    assert told in str(raised.value)
    with pytest.raises(ArgumentError, match="a file of prompts"):
        read_warm_prompts(str(tmp_path / "nothing"), [])
