"""Weights of tenants, and known texts, through the server: settings, the engine's tenants, tokens and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.running_server import running

from quire import LLM
from quire.errors import ArgumentError
from quire.server.api_keys import ADMIN, ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerSettings, load_config


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="64MiB") as one:
        yield one


def settings(*tenants: ApiTenant) -> ServerSettings:
    keys = KeyRing([(digest_of_key(f"key-{tenant.name}"), tenant) for tenant in (*tenants, ADMIN)])
    return ServerSettings(keys=keys, tenants=(ANYBODY, *tenants))


def as_tenant(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-{name}"}


def figure(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics", headers=as_tenant("admin")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def config(tmp_path: Path, weight: str) -> ServerSettings:
    path = tmp_path / "quire.toml"
    path.write_text(f'[[tenants]]\nname = "a"\nkeys = ["key-a"]\nweight = {weight}\n')
    return load_config(str(path), {})[0]


@pytest.mark.parametrize(("text", "weight"), [("2", 2.0), ("0.5", 0.5), ("1000", 1000.0)])
def test_a_weight_of_the_file(tmp_path: Path, text: str, weight: float) -> None:
    key = config(tmp_path, text).keys.find("key-a")
    assert key is not None
    assert key.tenant.weight == weight


@pytest.mark.parametrize("text", ["0", "-1", "1001", "nan", '"2"', "true"])
def test_a_weight_that_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(ArgumentError, match=r"weight in .*tenants"):
        config(tmp_path, text)


@pytest.mark.parametrize("weight", [0, -1, 1001, float("nan"), "2", True, None])
def test_a_weight_that_the_engine_refuses(llm: LLM, weight: Any) -> None:
    with pytest.raises(ArgumentError, match=r"expected a weight of 0.001 to 1000, got .* - of tenant 'w'"):
        llm.tenants.add("w", weight=weight)
    assert all(tenant.name != "w" for tenant in llm.tenants)


def test_the_engine_has_the_weights_and_the_metrics_the_tokens(llm: LLM) -> None:
    tenants = (ApiTenant("a", weight=3.0), ApiTenant("b"))
    with running(llm, settings(*tenants)) as (url, _):
        assert {tenant.name: tenant.weight for tenant in llm.tenants} == {"a": 3.0, "b": 1.0, "admin": 1.0}
        assert "weight" in llm.monitor.report()
        body = {"prompt": [5, *range(300, 330)], "max_tokens": 2, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=as_tenant("a"), timeout=60).is_success
        computed = 'quire:tenant_computed_tokens_total{model_name="embedded",tenant="%s"}'
        assert figure(url, computed % "a") == 32
        assert figure(url, computed % "b") == 0
        assert figure(url, "quire:withheld_prompt_tokens_total") == 0
        own = httpx.get(f"{url}/metrics", headers=as_tenant("a")).text
        assert "tenant_computed_tokens" not in own, "a tenant sees nothing of others"
        other = running(llm, settings(ApiTenant("a", weight=2.0), ApiTenant("b")))
        with pytest.raises(ArgumentError, match="expected the limits that tenant 'a' has"), other:
            raise AssertionError("the open engine has another weight")


def test_a_tenant_s_growing_text_is_tokenized_from_its_last_section_on(llm: LLM) -> None:
    text = "".join(f"Line {at} of a text that grows,\nand then goes on\nwith more.\n" for at in range(700))
    assert len(text) > 20_000
    with running(llm, settings(ApiTenant("a"), ApiTenant("b"))) as (url, _):

        def ask(name: str, prompt: str) -> list[int]:
            body = {"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": 50, "return_token_ids": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=as_tenant(name), timeout=60)
            assert answer.is_success, answer.text
            return answer.json()["choices"][0]["prompt_token_ids"]

        known = "quire:known_text_characters_total"
        longer = text + "And a question"
        expected = llm.tokenizer(longer)["input_ids"][-50:]
        before = figure(url, known)
        ask("a", text)
        assert figure(url, known) == before
        assert ask("b", longer) == expected
        assert figure(url, known) == before, "b does not find a's text"
        assert ask("a", longer) == expected
        assert figure(url, known) - before > len(text) - 2 * 4096 - 100
