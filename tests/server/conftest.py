"""A server on the embedded model, on a free loopback port, in this process; one for a module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from support.browser import by_id, start_browser
from support.drafts import SteadySpeculation
from support.held_steps import is_idle
from support.running_server import running
from support.until import until

from quire import LLM
from quire.server.http.request_log import LOGGER
from quire.server.settings import ServerSettings


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="64MiB") as one:
        yield one


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[tuple[str, object]]:
    with running(llm, ServerSettings()) as one:
        yield one


@pytest.fixture(scope="module")
def url(server: tuple[str, object]) -> str:
    return server[0]


@pytest.fixture(scope="module")
def small_llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Each request gets few tokens, also one that asks for more. The parameter is a `speculation`: each step that may
    have drafts has as many as it may."""
    speculation = getattr(request, "param", "off")
    with LLM(kv_memory="16MiB", max_model_len=48, speculation=speculation) as one:
        if speculation != "off":
            drafts = one.engine._speculation
            assert drafts is not None
            steady = SteadySpeculation(drafts._proposer, drafts.max_drafts)
            one.engine.scheduler.speculation = one.engine._speculation = steady
        yield one


@pytest.fixture(scope="module")
def small_server(small_llm: LLM) -> Iterator[tuple[str, object]]:
    """A server that has nothing under way, and holds no block, when its module's tests have ended."""
    with running(small_llm, ServerSettings()) as (url, app):
        yield url, app
        for pin in small_llm.pins:
            small_llm.pins.remove(pin)
        until(lambda: not app.state.service.num_open and is_idle(small_llm))
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.fixture
def serve(llm: LLM) -> Callable[..., object]:
    """`with serve(settings) as (url, app):` a server of one's own over the same model."""
    return lambda settings: running(llm, settings)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = start_browser()
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The live page, connected; nothing in it may have failed when the test ends."""
    browser.get_log("browser")
    browser.get(url)
    until(lambda: by_id(browser, "status").text == "live")
    yield browser
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    browser.get("about:blank")  # else it goes on watching
    assert not errors


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Of the log: one for each request that has ended, but of the page of metrics: an earlier test's may come late."""
    found: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda record: "/metrics" not in record.getMessage())
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
