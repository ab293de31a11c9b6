"""Whose keys and values a saved cache holds: a model's config and a digest of its weights.

The digest is over every parameter's and buffer's name, dtype, shape and bits, so that keys of one fine-tune are never
read into another. Packed weights (`accelerate`) count as the weights they were packed from.
Not kept: a weight may be changed in place without a trace, so it is computed each time it is asked for.

Cost: one pass of SHA-256 over the weights, about 1 to 2 s for each GiB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from quire.model.plain_weights import packed_weight

__all__ = ["fingerprint"]

# Fields of a config that say where it came from or how a forward is run, not what the numbers are.
_INCIDENTAL = frozenset({
    "_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "architectures", "torch_dtype", "dtype",
    "_commit_hash", "experts_implementation", "_experts_implementation_internal",
})  # fmt: skip


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """SHA-256 in hex of the model's config and of its weights."""
    config = json.dumps(_plain(model.config.to_dict()), sort_keys=True, default=str)
    digest = hashlib.sha256()
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # numpy has no bfloat16; the bits are what counts.
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return {"config": hashlib.sha256(config.encode()).hexdigest(), "weights": digest.hexdigest()}


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight once, by its first name, and every buffer that is saved."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            whole = f"{prefix}.{name}"
            if parameter is not None:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield whole, parameter
            elif (packed := packed_weight(module, name)) is not None:
                owner, unpack = packed
                if id(owner) not in seen:
                    seen.add(id(owner))
                    yield whole, unpack()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items() if key not in _INCIDENTAL}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
