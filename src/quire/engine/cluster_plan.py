"""`ClusterPlan`: what several replicas of a planned engine hold together, and a store that they share.

Each replica has a machine or a card as the plan's, its own weights, and its own keys and values. A prefix that all
requests share is once in the memory of each replica, and once in the store. A store holds prompts as segments: keys and
values of all tokens, and for a model with state layers one state a prompt; their headers (below 1 %) are left out.

Cost: O(layers).
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache.block_counts import blocks_with_prefix
from quire.engine.kv_capacity import KVLayout
from quire.sizes import format_size

__all__ = ["ClusterPlan", "cluster_plan"]


@dataclass(frozen=True)
class ClusterPlan:
    """Bytes are integers, lengths are tokens.

    Attributes:
        num_replicas: engines. weights_bytes, kv_bytes, total_bytes: of all together.
        prefix_bytes: keys and values of the shared prefix, in all memories together.
        max_concurrency: requests of the plan's context at once.
        store_bytes: of the store, 0: none. store_prefix_bytes: of the shared prefix there.
        max_store_prompts: different prompts of the plan's context that the store holds.
    """

    num_replicas: int
    weights_bytes: int
    kv_bytes: int
    total_bytes: int
    prefix_bytes: int
    max_concurrency: int
    store_bytes: int
    store_prefix_bytes: int
    max_store_prompts: int

    def lines(self, context: int, shared_prefix: int) -> list[str]:
        """context, shared_prefix: of the plan."""
        lines = [
            f"{self.num_replicas} replica{'s' * (self.num_replicas > 1)}: weights {format_size(self.weights_bytes)}, "
            f"kv_memory {format_size(self.kv_bytes)}, all {format_size(self.total_bytes)}; at most "
            f"{self.max_concurrency} requests of {context} tokens at once"
        ]
        if shared_prefix:
            lines.append(
                f"the first {shared_prefix} tokens, in each replica: {format_size(self.prefix_bytes)} of that"
            )
        if self.store_bytes:
            once = f", the first {shared_prefix} once ({format_size(self.store_prefix_bytes)})" * bool(
                shared_prefix
            )
            lines.append(
                f"store {format_size(self.store_bytes)}: at most {self.max_store_prompts} prompts of {context} "
                f"tokens{once}"
            )
        return lines


def cluster_plan(
    layout: KVLayout,
    *,
    num_replicas: int,
    context: int,
    shared_prefix: int,
    max_concurrency: int,
    weights_bytes: int,
    kv_bytes: int,
    total_bytes: int,
    store_bytes: int,
) -> ClusterPlan:
    """max_concurrency, weights_bytes, kv_bytes, total_bytes: of one replica."""
    spec, once = layout.spec, 0
    if shared_prefix and layout.shares_blocks:
        once, _ = blocks_with_prefix(spec.groups, context, shared_prefix, layout.block_size)
    prefix_bytes = once * layout.block_bytes + bool(shared_prefix) * spec.bytes_per_state
    store_prefix_bytes = shared_prefix * spec.bytes_per_token
    each = (context - shared_prefix) * spec.bytes_per_token + spec.bytes_per_state
    return ClusterPlan(
        num_replicas=num_replicas,
        weights_bytes=num_replicas * weights_bytes,
        kv_bytes=num_replicas * kv_bytes,
        total_bytes=num_replicas * total_bytes,
        prefix_bytes=num_replicas * prefix_bytes,
        max_concurrency=num_replicas * max_concurrency,
        store_bytes=store_bytes,
        store_prefix_bytes=store_prefix_bytes,
        max_store_prompts=max(0, store_bytes - store_prefix_bytes) // each if store_bytes and each else 0,
    )
