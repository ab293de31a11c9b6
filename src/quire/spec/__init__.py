"""What a token costs: the shape of a model's KV cache, and how a model's config says it."""

from quire.spec.kv_spec import DTYPE_BYTES, KVGroup, KVSpec, LayerSpec, Retention

__all__ = ["DTYPE_BYTES", "KVGroup", "KVSpec", "LayerSpec", "Retention"]
