"""An answer says how much of its prompt was cached and why no more, on every door, without another tenant's content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support import tiny_llm
from support.running_server import running

from quire.server.api_keys import ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerSettings

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
ASK = {"X-Cache-Report": "true"}
DOORS = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 2},
    "/v1/messages": lambda text: {
        "model": "Qwen3ForCausalLM",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": text}],
    },
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 16},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = ServerSettings(served_model_name="Qwen3ForCausalLM")
    with tiny_llm.llm() as llm, running(llm, settings) as (one, _):
        yield one


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json=body, headers=headers or {}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("path", list(DOORS))
def test_every_door_tells_why_in_a_header(url: str, path: str) -> None:
    text = f"{path}: {TEXT}"
    post(url, path, DOORS[path](text))
    answer = post(url, path, DOORS[path](text.replace("lazy", "tame")), ASK)
    report = json.loads(answer.headers["x-quire-cache-report"])
    assert report["cause"] == "differs"
    words = report["where_it_differs"]
    assert words["before"].endswith("the ")
    assert f"lazy dog, and {TEXT}".startswith(words["stored"])  # up to the end of its block
    assert words["stored"]
    assert words["asked"].startswith("tame")
    assert report["first_missing"] == report["matched_tokens"]["memory"] > 0
    again = post(url, path, DOORS[path](text), ASK)
    assert json.loads(again.headers["x-quire-cache-report"])["cause"] == "complete"
    assert "x-quire-cache-report" not in post(url, path, DOORS[path](text)).headers
    refused = httpx.post(
        f"{url}{path}", json=DOORS[path](text), headers={"X-Cache-Report": "perhaps"}, timeout=60
    )
    assert refused.status_code == 400
    assert "X-Cache-Report" in refused.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_body_has_the_report_and_the_usage_counts(url: str, path: str, stream: bool) -> None:
    body = DOORS[path](f"{path} {stream}: {TEXT}") | {"cache_report": True, "stream": stream}
    for cause in ("differs", "complete"):
        answer = post(url, path, body)
        if stream:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            fields = json.loads(lines[-1])
        else:
            fields = answer.json()
        report, usage = fields["cache_report"], fields["usage"]
        assert report["cause"] == cause
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] == sum(report["matched_tokens"].values())
        assert details["cached_tokens"] + details["computed_tokens"] == usage["prompt_tokens"]
        assert details["cache_write_tokens"] == details["computed_tokens"]


def test_several_prompts_have_a_report_each(url: str) -> None:
    body = {"prompt": ["first " + TEXT, "second " + TEXT], "max_tokens": 1, "cache_report": True}
    reports = post(url, "/v1/completions", body).json()["cache_report"]
    assert [report["prompt_tokens"] for report in reports] == [len("first " + TEXT), len("second " + TEXT)]


def test_no_tenant_learns_of_another_ones_content() -> None:
    tenants = (ApiTenant("alice"), ApiTenant("bob"))
    keys = KeyRing([(digest_of_key(tenant.name), tenant) for tenant in tenants])
    settings = ServerSettings(keys=keys, tenants=tenants)
    secret = "a secret that is of alice alone, whatever the others ask for"
    with tiny_llm.llm() as llm, running(llm, settings) as (url, _):
        for path in ("/v1/chat/completions", "/v1/completions"):
            body = DOORS[path](secret) | {"cache_report": True}
            post(url, path, body, {"Authorization": "Bearer alice"})
            asked = DOORS[path](secret.replace("alone", "only")) | {"cache_report": True}
            answer = post(url, path, asked, {"Authorization": "Bearer bob"})
            report = answer.json()["cache_report"]
            assert report["matched_tokens"] == {"memory": 0}
            assert report["cause"] != "other namespace"
            assert "alone" not in json.dumps(report)
