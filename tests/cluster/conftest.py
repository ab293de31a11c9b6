"""Two engines on the embedded model, each with the whole API, and a door over them; nothing of Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from quire.cluster.cluster_settings import ClusterSettings
from quire.cluster.door import Door
from quire.cluster.prompt_keys import PromptKeys
from quire.cluster.replica_group import ReplicaGroup, ReplicaLostError
from quire.cluster.replica_server import AnswerPart, CarriedRequest, ReplicaServer
from quire.cluster.route_table import RouteTable
from quire.weights.load import load_tokenizer

SECRET = b"a secret of sixteen bytes"


class LocalCluster:
    """The door, and what Ray does for it: `lose(name)` makes a replica unreachable, at once or after some parts of the
    next answer."""

    def __init__(self, replicas: Mapping[str, ReplicaServer], settings: ClusterSettings) -> None:
        self.replicas = replicas
        self.table = RouteTable()
        self.keys = PromptKeys(load_tokenizer(settings.engine.model), settings.server)
        max_body_bytes = settings.server.limits.max_body_bytes
        self.group = ReplicaGroup(self.table, self._send, settings.hang_seconds)
        self.door = Door(self.group, self.keys, max_body_bytes)
        self.sent: list[tuple[str, str]] = []  # (replica, path)
        self._parts_left: dict[str, int] = {}
        self._next_parts: int | None = None
        self.when_lost: list[Callable[[str], object]] = []  # one call for each loss in an answer
        self.report()

    def report(self) -> None:
        """Brings the replicas' digests to the door."""
        self.table.set_replicas({name: replica.routing_stats() for name, replica in self.replicas.items()})

    def lose(self, name: str, num_parts: int = 0) -> None:
        """num_parts: of the next answers together, before the replica is lost."""
        self._parts_left[name] = num_parts

    def lose_next(self, num_parts: int = 0) -> None:
        """As `lose`, of the replica that gets the next request."""
        self._next_parts = num_parts

    def find_all(self) -> None:
        """All replicas can be reached again."""
        self._parts_left.clear()

    async def _send(self, request: CarriedRequest, ticket: int) -> AsyncGenerator[AnswerPart, None]:
        name = self.table.rank(ticket, list(self.replicas))[0]
        self.table.note_sent(ticket, name)
        self.sent.append((name, request.path))
        if self._next_parts is not None:
            self._parts_left[name], self._next_parts = self._next_parts, None
        if self._parts_left.get(name) == 0:
            raise ReplicaLostError(name)
        answer = self.replicas[name].answer(request)
        try:
            async for part in answer:
                yield part
                if name in self._parts_left:
                    self._parts_left[name] -= 1
                    if self._parts_left[name] == 0:
                        if self.when_lost:
                            self.when_lost.pop(0)(name)
                        raise ReplicaLostError(name)
        finally:
            await answer.aclose()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI application."""
        answer = await self.door.answer(Request(scope, receive))
        await answer(scope, receive, send)

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self, client=("127.0.0.1", 1))
        return httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers, timeout=60
        )


def settings_of(**arguments: Any) -> ClusterSettings:
    arguments = {"engine": {"kv_memory": "16MiB", "max_model_len": 512}, **arguments}
    return ClusterSettings.from_arguments(arguments, SECRET)


@pytest.fixture(scope="module")
def keyed_settings(tmp_path_factory: pytest.TempPathFactory) -> ClusterSettings:
    """Two tenants and an administrator."""
    path = tmp_path_factory.mktemp("cluster") / "quire.toml"
    path.write_text(
        '[server]\nadmin_key = "root"\n[[tenants]]\nname = "alice"\nkeys = ["a"]\n'
        '[[tenants]]\nname = "bob"\nkeys = ["b"]\n'
    )
    path.chmod(0o600)
    return settings_of(config=str(path))


@pytest.fixture(scope="module")
def replicas(keyed_settings: ClusterSettings) -> Iterator[dict[str, ReplicaServer]]:
    made = {name: ReplicaServer(keyed_settings, name) for name in ("one", "two")}
    yield made
    for replica in made.values():
        replica.close()


@pytest.fixture
def cluster(replicas: dict[str, ReplicaServer], keyed_settings: ClusterSettings) -> LocalCluster:
    return LocalCluster(replicas, keyed_settings)
