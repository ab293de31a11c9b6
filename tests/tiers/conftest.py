from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis_server import redis_server


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that a module's tests share, one after the other."""
    with redis_server(Path(tmp_path_factory.mktemp("redis"))) as url:
        yield url


@pytest.fixture
def redis_url(shared_redis: str) -> str:
    """The URL of a server that holds nothing."""
    import redis

    with redis.Redis.from_url(shared_redis) as client:
        client.flushall()
    return shared_redis


@pytest.fixture(autouse=True)
def loading_pays() -> None:
    """Not here (`support/loading_pays.py`): what loading is expected to take is under test."""
