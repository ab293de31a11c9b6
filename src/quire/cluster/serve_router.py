"""`QuireRouter`: Ray Serve's request router over the `RouteTable` that the door of the same process has.

Serve makes a router for each deployment in each process that has a handle of it; of a cluster that is the door alone.
Calls of the handle have the ticket as keyword `ticket`. `routing_stats` of a replica is its newest report.

Serve pickles this class by value, its globals too: the table is reached through its module, which is not copied.

Needs ray[serve] (`quire-kv[cluster]`). Ray calls its router API alpha: nothing else of Quire uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica  # pyright: ignore[reportMissingImports]

from quire.cluster import route_table

if TYPE_CHECKING:
    from quire.cluster.route_table import RouteTable

__all__ = ["QuireRouter"]


class QuireRouter(RequestRouter):
    """Tries the replicas in the table's order."""

    @property
    def _table(self) -> RouteTable:
        return route_table.TABLES[self._deployment_id.name]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.set_replicas(
            {replica.replica_id.unique_id: replica.routing_stats or {} for replica in replicas}
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._table.forget(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between two rounds, else Serve spins
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[name]] for name in self._table.rank(_ticket_of(pending_request), list(by_name))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.note_sent(_ticket_of(pending_request), replica_id.unique_id)


def _ticket_of(request: PendingRequest) -> int:
    return request.kwargs.get("ticket", 0)
