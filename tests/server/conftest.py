"""A server on the embedded model, on a free loopback port, in this process; one for a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.running_server import running

from quire import LLM
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


@pytest.fixture
def serve(llm: LLM) -> Callable[..., object]:
    """`with serve(settings) as (url, app):` a server of one's own over the same model."""
    return lambda settings: running(llm, settings)
