"""How many replicas a cluster should have: enough for the open requests and for the KV memory that they hold.

Cost: O(replicas).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["desired_replicas", "replicas_for"]


def replicas_for(num_requests: float, target_requests: float, kv_loads: Iterable[float]) -> float:
    """The number of replicas, not rounded. num_requests: open ones of all replicas; target_requests: of one replica.
    kv_loads: of each replica, its share of blocks in use over the share that it should have."""
    return max(num_requests / target_requests, sum(kv_loads))


def desired_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """`replicas_for` as a policy of Ray Serve, which rounds up and applies bounds and delays. context: the
    one that Serve calls policies with."""
    kv_loads = (context.aggregated_metrics or {}).get("kv_load", {})
    wanted = replicas_for(
        context.total_num_requests, context.config.get_target_ongoing_requests(), kv_loads.values()
    )
    return wanted, {}
