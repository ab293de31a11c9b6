"""Latent layers in every storage: the values are the keys' first columns and take no memory of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire import KVSpec
from quire.baselines.contiguous import ContiguousStorage
from quire.baselines.growing import GrowingStorage, granule
from quire.memory.paged import PagedStorage
from quire.memory.placement import unsupported_reason
from quire.memory.virtual.page_sizes import virtual_block_size
from quire.memory.virtual.virtual_storage import VirtualStorage
from quire.spec import LayerSpec, Span

LATENT = LayerSpec(Span(), 1, 576, 512, latent=True)
SMALL = LayerSpec(Span(), 1, 40, 32, latent=True)
SPEC = KVSpec((LATENT, SMALL, LayerSpec(Span(), 2, 16, 24)), "bfloat16")


def virtual(spec: KVSpec) -> VirtualStorage:
    if (reason := unsupported_reason()) is not None:
        pytest.skip(f"no virtual storage here: {reason}")
    size = virtual_block_size(spec)
    return VirtualStorage(spec, 4, size, max_model_len=2 * size, max_num_seqs=2, max_blocks=4)


STORAGES: dict[str, Any] = {
    "paged": lambda spec: PagedStorage(spec, 5, 16, max_blocks=5),
    "contiguous": lambda spec: ContiguousStorage(spec, 64, 32),
    "growing": lambda spec: GrowingStorage(spec, 40, 32),
    "virtual": virtual,
}


@pytest.mark.parametrize("name", STORAGES)
def test_values_are_the_first_columns_of_keys(name: str) -> None:
    storage = STORAGES[name](SPEC)
    for number, layer in enumerate(SPEC.layers):
        view = storage.view(number)
        assert (view.k_head_dim, view.v_head_dim) == (layer.k_head_dim, layer.v_head_dim)
        assert (view.v.data_ptr() == view.k.data_ptr()) == layer.latent
        assert not layer.latent or view.v.stride() == view.k.stride()
    storage.close()


@pytest.mark.parametrize("name", STORAGES)
def test_a_latent_layer_takes_the_bytes_of_its_keys(name: str) -> None:
    latent, plain = KVSpec((SMALL,) * 3, "float32"), KVSpec((LayerSpec(Span(), 1, 40, 32),) * 3, "float32")
    kept, expanded = STORAGES[name](latent), STORAGES[name](plain)
    if name == "growing":  # whose blocks are pages
        tokens, pages = granule(SMALL, 4)
        assert pages * 4096 == tokens * 40 * 4
    else:
        per_token = [
            one.block_bytes // getattr(one, "block_size", 1) for one in (kept, expanded)
        ]  # of all layers
        assert per_token == [3 * 40 * 4, 3 * 72 * 4]
    kept.close()
    expanded.close()


def test_a_copy_takes_the_first_tokens_along() -> None:
    storage = PagedStorage(SPEC, 5, 16, max_blocks=5)
    storage.fill(0.0)
    group = next(group for group in SPEC.groups if group.layers == (0,))
    k = storage.view(0).k
    k[1] = torch.randn(k[1].shape).to(k.dtype)
    storage.copy(np.array([[1, 3, 5]]), group.index)
    assert torch.equal(k[3, :, :5], k[1, :, :5])
    assert not k[3, :, 5:].any()
    storage.close()
