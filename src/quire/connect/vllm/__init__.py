"""A KV connector for vLLM: any vLLM keeps prefixes in Quire's tiers, and finds them there.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "QuireConnector", "kv_connector_module_path":
        "quire.connect.vllm", "kv_role": "kv_both", "kv_connector_extra_config": {"disk_cache": "/var/cache/kv"}}'

connector          `QuireConnector`, the only module that imports vllm: it hands each call to one of the two sides
scheduler_side     owns the tiers: finds the prefixes of requests, decides what is loaded and saved
worker_side        copies blocks between vLLM's memory and payloads
step_transfers     the messages of the two sides in a step
prefix_load        the longest stored prefix of a prompt on its way into host memory
connector_options  kv_connector_extra_config
model_identity     the fingerprint of a vLLM's keys and values

Nothing here imports transformers: vLLM has its own version of it.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports vllm only when the connector itself is asked for."""
    if name != "QuireConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire.connect.vllm.connector import QuireConnector

    return QuireConnector
