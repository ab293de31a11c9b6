"""`create_app` under servers of others and mounted in an application of others."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from support.asgi_hosts import HOSTS, mounted, under_uvicorn
from support.browser import ask_for_completion, by_id
from support.forked_program import run_program
from support.held_steps import held_steps
from support.until import until
from support.window_client import Watcher, ask

from quire import LLM, AsyncEngine, SamplingParams
from quire.config import EngineConfig
from quire.errors import ArgumentError
from quire.server import ServerSettings, app_lifespan, create_app
from quire.server.api_keys import ApiTenant, KeyRing, digest_of_key

MESSAGES: Any = [{"role": "user", "content": "Write a function that counts the lines of a file."}]
SMALL = EngineConfig(kv_memory="16MiB")


@pytest.fixture(scope="module", params=HOSTS)
def hosted(request: pytest.FixtureRequest, llm: LLM) -> Iterator[tuple[str, Any]]:
    app = create_app(llm)
    with HOSTS[request.param](app) as url:
        yield url, app


def streamed(url: str, **options: Any) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(
        model="embedded", messages=MESSAGES, temperature=0, max_tokens=12, stream=True, **options
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# -- every host ----------------------------------------------------------------------------------------------


def test_a_chat_is_streamed(hosted: tuple[str, Any], llm: LLM) -> None:
    url, _ = hosted
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole = (
        client.chat.completions.create(model="embedded", messages=MESSAGES, temperature=0, max_tokens=12)
        .choices[0]
        .message.content
    )
    assert whole
    assert streamed(url) == whole


def test_errors_have_their_bodies(hosted: tuple[str, Any]) -> None:
    url, _ = hosted
    mount = urllib.parse.urlsplit(url).path
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "nothing": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "nothing")
    assert answer.headers["x-request-id"]
    for path, hint in (
        ("/completions", f"is {mount}/v1/completions meant"),
        ("/v1/health", f"is {mount}/health meant"),
        ("/v1/conversations/conv-1/fork", f"at {mount}/quire/conversations/conv-1/fork"),
        ("/other", f"GET {mount}/openapi.json lists"),
    ):
        answer = httpx.get(url + path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith(f"there is no GET {mount}{path}; ")
        assert hint in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/openapi.json").status_code == 200
    assert httpx.get(f"{url}/v1/completions").json()["error"]["code"] == "method_not_allowed"
    assert httpx.head(f"{url}/health").status_code == 200
    assert (
        httpx.get(f"{url}/health", headers={"Host": "evil.example"}).json()["error"]["code"] == "foreign_host"
    )


def test_a_request_ends_with_its_client(hosted: tuple[str, Any], llm: LLM) -> None:
    url, app = hosted
    body = {"prompt": "def f(x):", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with held_steps(llm) as steps:
        steps.go(3)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert app.state.service.num_open == 1
        until(lambda: app.state.service.num_open == 0 or steps.go(1))
        assert steps.num_begun < 1000


def test_the_live_page_finds_its_files_and_events(hosted: tuple[str, Any]) -> None:
    url, _ = hosted
    answer = httpx.get(url, follow_redirects=True)
    assert answer.status_code == 200
    files = re.findall(r'(?:src|href)="([^"#]+)"', answer.text)
    assert {"window/main.js", "window/page.css", "favicon.ico"} <= set(files)
    for name in files:
        assert httpx.get(urllib.parse.urljoin(str(answer.url), name)).status_code == 200, name
    with Watcher(url) as watcher:
        assert watcher.until(lambda state: "counts" in state)["counts"]["held"] >= 0
    assert ask(url, "/window/blocks/0")[0] == 200


@pytest.mark.ci
def test_the_live_page_works_in_a_browser(hosted: tuple[str, Any], browser: Any) -> None:
    url, _ = hosted
    browser.get_log("browser")
    browser.get(f"{url}/")
    try:
        until(lambda: by_id(browser, "status").text == "live")
        ask_for_completion(browser, 4, "import os")
        until(lambda: "ended" in by_id(browser, "completion-meta").text)
        by_id(browser, "find-block").send_keys("0")
        browser.find_element("css selector", "#find button").click()
        until(lambda: by_id(browser, "details").is_displayed())
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        browser.get("about:blank")


# -- several applications ------------------------------------------------------------------------------------


def test_two_applications_in_one_process(llm: LLM) -> None:
    """One engine each, next to the host's own routes."""
    key = "a-key-of-one-of-them"
    keys = KeyRing([(digest_of_key(key), ApiTenant("alice"))])
    with LLM(kv_memory="16MiB") as other:
        apps = {
            "/a": create_app(llm, ServerSettings(served_model_name="first")),
            "/b": create_app(other, ServerSettings(served_model_name="second", keys=keys)),
        }
        with under_uvicorn(mounted(apps)) as url:
            answer = httpx.get(f"{url}/v1/models")
            assert (answer.json(), answer.headers["x-host"]) == ({"of": "host"}, "host")
            answer = httpx.get(f"{url}/a/v1/models")
            assert (answer.json()["data"][0]["id"], answer.headers["x-host"]) == ("first", "host")
            assert httpx.get(f"{url}/b/v1/models").status_code == 401
            answer = httpx.get(f"{url}/b/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.json()["data"][0]["id"] == "second"
            before = other.stats()["num_generated_tokens"]
            body = {"prompt": "import", "max_tokens": 2}
            assert httpx.post(f"{url}/a/v1/completions", json=body, timeout=60).status_code == 200
            assert other.stats()["num_generated_tokens"] == before
        assert other.generate("import")  # the caller's, still open
    assert llm.generate("import")


# -- the engine's life ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_a_config_is_opened_and_closed_with_the_lifespan(host: str) -> None:
    app = create_app(SMALL, ServerSettings(tenant_secret=b"s" * 16))
    assert app.state.service is None
    for _ in range(2):
        with HOSTS[host](app) as url:
            until(lambda: app.state.service is not None)
            llm = app.state.service.engine.llm
            assert streamed(url)
        with pytest.raises(ArgumentError, match="one that was closed"):
            llm.generate("import")


class Openings:
    """Counts the engines that applications open; each opening waits for `may_open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_open = threading.Event()
        self.num_begun = 0
        self.engines: list[AsyncEngine] = []
        openings = self

        class CountedEngine(AsyncEngine):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                openings.num_begun += 1
                assert openings.may_open.wait(60)
                super().__init__(*arguments, **options)
                openings.engines.append(self)

        monkeypatch.setattr(app_lifespan, "AsyncEngine", CountedEngine)


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Openings]:
    made = Openings(monkeypatch)
    yield made
    made.may_open.set()
    for engine in made.engines:
        engine.close()


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def status_of(app: Any, path: str = "/ready") -> int:
    async with client_of(app) as client:
        return (await client.get(path)).status_code


async def until_begun(openings: Openings) -> None:
    while not openings.num_begun:
        await asyncio.sleep(0.001)


def test_without_a_lifespan_the_first_request_opens_a_config_once(openings: Openings) -> None:
    openings.may_open.set()
    app = create_app(SMALL)
    with under_uvicorn(mounted({"/llm": app}, runs_lifespans=False)) as url:
        assert httpx.get(f"{url}/llm/health").json() == {"status": "not_loaded"}
        assert not openings.num_begun
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda _: streamed(f"{url}/llm"), range(4)))
        assert answers[0]
        assert len(set(answers)) == openings.num_begun == 1


def test_requests_of_several_event_loops_open_a_config_once(
    openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(SMALL)
    begun, open_for_request = [], app_lifespan.AppLifespan.open_for_request

    async def counted(lifespan: app_lifespan.AppLifespan) -> None:
        begun.append(lifespan)
        await open_for_request(lifespan)

    monkeypatch.setattr(app_lifespan.AppLifespan, "open_for_request", counted)
    with ThreadPoolExecutor(2) as loops:
        answers = [loops.submit(lambda: asyncio.run(status_of(app))) for _ in range(2)]
        until(lambda: len(begun) == 2)
        openings.may_open.set()
        assert [answer.result() for answer in answers] == [200, 200]
    assert openings.num_begun == 1


def test_an_opening_outlasts_the_event_loop_that_began_it(openings: Openings) -> None:
    app = create_app(SMALL)

    async def leave() -> None:
        asking = asyncio.create_task(status_of(app))
        await until_begun(openings)
        assert await status_of(app, "/health") == 503
        asking.cancel()
        openings.may_open.set()

    asyncio.run(leave())
    assert asyncio.run(status_of(app)) == 200
    assert openings.num_begun == 1


def test_a_cancelled_start_closes_the_engine_that_it_opens(openings: Openings) -> None:
    app = create_app(SMALL)

    async def enter() -> None:
        async with app.router.lifespan_context(app):
            raise AssertionError("it was cancelled")

    async def run() -> None:
        entering = asyncio.create_task(enter())
        await until_begun(openings)
        entering.cancel()
        await asyncio.sleep(0)
        openings.may_open.set()
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(run())
    until(lambda: openings.engines)
    with pytest.raises(ArgumentError, match="one that was closed"):
        openings.engines[0].llm.generate("import")
    assert asyncio.run(status_of(app)) == 503
    assert openings.num_begun == 1


def test_a_second_lifespan_is_refused_until_the_first_has_ended(llm: LLM) -> None:
    app = create_app(llm)

    async def run() -> None:
        async with app.router.lifespan_context(app):
            with pytest.raises(ArgumentError, match="one lifespan of the application at a time"):
                async with app.router.lifespan_context(app):
                    pass
            assert await status_of(app) == 200
        async with app.router.lifespan_context(app):
            assert await status_of(app) == 200

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_the_logs_and_tried_again(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(app_lifespan, "time", clock, raising=False)
    folder = tmp_path / "secret-place"
    app = create_app(EngineConfig(model=str(folder)))
    with pytest.raises(RuntimeError, match="did not start"), under_uvicorn(app):
        pass
    assert "secret-place" in caplog.text
    origin = "https://page.example"
    app = create_app(EngineConfig(model=str(folder)), ServerSettings(allowed_origins=(origin,)))
    with under_uvicorn(mounted({"/llm": app}, runs_lifespans=False)) as url:
        for is_attempt in (True, False, True):
            caplog.clear()
            answer = httpx.get(f"{url}/llm/v1/models", headers={"Origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_loaded")
            assert answer.headers["retry-after"] == "10"
            assert answer.headers["access-control-allow-origin"] == origin
            assert "secret-place" not in answer.text
            assert ("secret-place" in caplog.text) == is_attempt
            if not is_attempt:
                clock.now += 10


def test_after_its_lifespan_an_application_refuses(llm: LLM) -> None:
    app = create_app(llm)

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        statuses = []
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for _ in range(2):
                async with app.router.lifespan_context(app):
                    statuses.append((await client.get("/ready")).status_code)
                statuses.append((await client.get("/ready")).status_code)
        return statuses

    assert asyncio.run(run()) == [200, 503, 200, 503]
    assert llm.generate("import")


def test_an_engine_of_another_kind_is_refused(llm: LLM) -> None:
    with pytest.raises(ArgumentError, match="expected an AsyncEngine, an LLM or an EngineConfig, got str"):
        create_app("model")  # type: ignore[arg-type]


def test_limits_that_the_engine_cannot_keep_are_refused_at_once() -> None:
    settings = ServerSettings(tenants=(ApiTenant("alice", floor_bytes=1 << 40),))
    with LLM(kv_memory="8MiB") as llm:
        with pytest.raises(ArgumentError, match="floor"):
            create_app(llm, settings)
        assert llm.generate("import")


# -- the caller's engine -------------------------------------------------------------------------------------


def with_tenant(name: str, **options: Any) -> ServerSettings:
    tenant = ApiTenant(name, **options)
    return ServerSettings(tenants=(tenant,), keys=KeyRing([(digest_of_key(f"key-{name}"), tenant)]))


def test_two_applications_share_an_llm_and_leave_the_callers_tenants() -> None:
    with LLM(kv_memory="16MiB", generation_config="none") as llm:
        llm.tenants.add("mine", priority=3)
        first, second = create_app(llm, with_tenant("alice")), create_app(llm, with_tenant("bob"))
        with under_uvicorn(mounted({"/a": first, "/b": second})) as url:
            for mount, name in (("a", "alice"), ("b", "bob")):
                answer = httpx.post(
                    f"{url}/{mount}/v1/completions",
                    json={"prompt": "import", "max_tokens": 2},
                    headers={"Authorization": f"Bearer key-{name}"},
                    timeout=60,
                )
                assert answer.status_code == 200, answer.text
            with pytest.raises(ArgumentError, match="limits that tenant 'alice' has"):
                create_app(llm, with_tenant("alice", priority=1))
        with pytest.raises(ArgumentError, match="limits that tenant 'mine' has"):
            create_app(llm, with_tenant("mine"))
        create_app(llm, with_tenant("alice", priority=1))  # the others have ended
        assert {tenant.name: tenant.priority for tenant in llm.tenants} == {"mine": 3, "alice": 1}


def test_the_default_of_max_tokens_stays_the_callers() -> None:
    with LLM(kv_memory="32MiB", generation_config="none", max_model_len=400) as llm:
        app = create_app(llm)
        with under_uvicorn(app) as url:
            body = {"prompt": [300], "max_tokens": None, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.json()["usage"]["total_tokens"] == 400
        assert len(llm.generate([300], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 256


def test_a_tenant_that_cannot_be_added_leaves_none_behind() -> None:
    tenants = (ApiTenant("alice"), ApiTenant("bob", floor_bytes=1 << 40))
    with LLM(kv_memory="8MiB") as llm:
        with pytest.raises(ArgumentError, match="floor"):
            create_app(llm, ServerSettings(tenants=tenants))
        assert not len(llm.tenants)


@pytest.mark.parametrize("name", ["tenant_secret", "remote_secret"])
def test_secrets_that_the_open_engine_lacks_are_refused(llm: LLM, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"in `{name}`"):
        create_app(llm, ServerSettings(**{name: b"sixteen bytes and more"}))


def test_the_secret_of_the_open_engine_is_accepted() -> None:
    secret = b"sixteen bytes and more"
    with LLM(kv_memory="8MiB", tenant_secret=secret) as llm:
        create_app(llm, ServerSettings(tenant_secret=secret))


def test_warnings_of_the_settings_are_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    create_app(llm, ServerSettings(warnings=("others can read the file",)))
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        ("quire", "WARNING", "others can read the file")
    ]


_PROGRAM = """
import asyncio, gc, logging, signal, sys, threading, warnings
import fastapi, httpx, uvicorn


def look():
    names = ["", "quire", "quire.server", "quire.requests", "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"]
    loggers = [logging.getLogger(name) for name in names]
    return {
        "loggers": [(a.level, a.disabled, a.propagate, a.handlers[:], a.filters[:]) for a in loggers],
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup": signal.set_wakeup_fd(-1),
        "policy": asyncio.get_event_loop_policy(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "warnings": list(warnings.filters),
    }


async def main():
    during = look()
    loop = asyncio.get_running_loop()
    in_loop = (loop.get_exception_handler(), loop.get_debug(), loop.get_task_factory())
    from quire.config import EngineConfig
    from quire.server import ServerSettings, create_app

    app = create_app(EngineConfig(kv_memory="8MiB"), ServerSettings(log_requests=True))
    host = fastapi.FastAPI()
    host.mount("/llm", app)
    transport = httpx.ASGITransport(host, client=("127.0.0.1", 1))
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/llm") as client:
            answer = await client.post("/v1/completions", json={"prompt": "import", "max_tokens": 2}, timeout=60)
            assert answer.status_code == 200, answer.text
        now = look()
        for name in during:
            assert during[name] == now[name], f"{name} was {during[name]!r:.500}, is {now[name]!r:.500}"
    assert in_loop == (loop.get_exception_handler(), loop.get_debug(), loop.get_task_factory())


before = look()
asyncio.run(main())
after = look()
for name in before:
    assert before[name] == after[name], f"{name} was {before[name]!r:.500}, is {after[name]!r:.500}"
print("same")
"""


def test_nothing_of_the_host_process_changes() -> None:
    done = run_program(_PROGRAM, env={n: v for n, v in os.environ.items() if not n.startswith("HF_HUB_")})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same\n"
    assert done.stderr == ""
