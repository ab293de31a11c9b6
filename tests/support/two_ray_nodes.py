"""A Ray of two nodes on this machine, each with an address and one CPU of its own, and `quire cluster serve` on it.

python tests/support/two_ray_nodes.py OPTION ...
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

from quire.cli.main import main

_STORE_BYTES = 128 << 20


def start() -> Cluster:
    node = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=node)
    nodes.add_node(**node, node_ip_address="127.0.0.2")  # the head has the machine's
    return nodes


if __name__ == "__main__":
    cluster = start()
    try:
        sys.argv = ["quire", "cluster", "serve", "--address", cluster.address, *sys.argv[1:]]
        main()
    finally:
        cluster.shutdown()
