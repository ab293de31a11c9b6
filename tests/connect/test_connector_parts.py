"""The connector's options, its copies of blocks, its fingerprint, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.connect.vllm.connector_options import ConnectorOptions
from quire.connect.vllm.model_identity import kv_fingerprint, weights_digest
from quire.connect.vllm.step_transfers import BlockLoad, BlockSave, StepTransfers
from quire.connect.vllm.worker_side import WorkerSide
from quire.errors import ArgumentError


def test_options_have_the_names_of_an_engines_tiers() -> None:
    options = ConnectorOptions.parse(
        {"disk_cache": "/tmp/kv", "disk_cache_size": "1GiB", "salt_quota": "10MiB"}
    )
    assert options.tiers.disk_cache == "/tmp/kv"
    assert options.tiers.disk_cache_size == "1GiB"
    assert options.salt_quota == 10 << 20
    assert ConnectorOptions.parse({"host_cache": "1MiB", "max_wait_s": 2}).max_wait_s == 2.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "host_cache, disk_cache, peers, remote_cache"),
        ({"host_cache": "1MiB", "peer_listen": "h:1"}, "peer_listen"),
        ({"disk_cache_size": "1GiB", "host_cache": "1MiB"}, "disk_cache_size"),
        ({"host_cache": "lots"}, "host_cache"),
        ({"host_cache": "1MiB", "max_wait_s": 0}, "max_wait_s"),
        ({"host_cache": "1MiB", "max_wait_s": True}, "max_wait_s"),
        ({"host_cache": "1MiB", "salt_quota": "-1"}, "salt_quota"),
        ({"host_cache": "1MiB", "model_version": 3}, "model_version"),
    ],
)
def test_a_wrong_option_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ConnectorOptions.parse(given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("split", [1, 4])
def test_blocks_that_are_saved_and_loaded_elsewhere_have_the_same_bytes(
    dtype: torch.dtype, split: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5 * split, 2, 4, 6), (5 * split, 1, 4, 3)]
    layers = {f"layer {i}": _random(shape, dtype, generator) for i, shape in enumerate(shapes)}
    strided = _random((2, 5 * split, 4, 6), dtype, generator).transpose(0, 1)  # heads before blocks in memory
    layers |= {"strided": strided, "the same memory": layers["layer 0"]}
    source, target = WorkerSide(5), WorkerSide(5)
    copies = {name: torch.zeros_like(layer) for name, layer in layers.items() if name != "the same memory"}
    source.register(layers)
    target.register(copies)
    source.save([BlockSave(7, (3, 0, 4))])
    results = source.take_results()
    assert results is not None
    [(number, payload)] = results.payloads()
    assert number == 7
    assert source.take_results() is None
    payload.flags.writeable = False
    target.load([BlockLoad(payload, 3, 1, (2, 1))])
    for name, copy in copies.items():
        blocks, copied = (one.unflatten(0, (5, split)) for one in (layers[name], copy))
        for there, here in ((0, 2), (4, 1)):
            assert torch.equal(blocks[there].view(torch.uint8), copied[here].view(torch.uint8))
        assert not copied[[0, 3, 4]].view(torch.uint8).any()


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    item = torch.empty(0, dtype=dtype).element_size()
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * item), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype)


def test_the_blocks_of_an_ended_request_are_reported_once() -> None:
    side = WorkerSide(2)
    side.register({"layer": torch.zeros(2, 1, 4, 4)})
    side.save_last(StepTransfers(last_saves={"a": [BlockSave(1, (0,))], "b": [BlockSave(2, (1,))]}))
    assert side.take_ended() == {"a", "b"}
    assert side.take_ended() == set()
    results = side.take_results()
    assert results is not None
    assert sorted(results.parts) == [1, 2]


def test_memory_of_another_shape_is_refused() -> None:
    side = WorkerSide(3)
    with pytest.raises(ArgumentError, match="3 blocks for the layer first"):
        side.register({"first": torch.zeros(4, 1, 4, 4)})
    side.register({"layer": torch.zeros(3, 1, 4, 4)})
    with pytest.raises(ArgumentError, match="expected 64 bytes"):
        side.load([BlockLoad(np.zeros(63, np.uint8), 1, 0, (0,))])


def _config(folder: Path, **changed: Any) -> Any:
    model = {"model": str(folder), "revision": None, "dtype": "bf16", "quantization": None, "seed": 0}
    config = {"rope_theta": 1e4, "_name_or_path": str(folder), "transformers_version": "5"}
    cache = {"cache_dtype": "auto", "block_size": 16}
    for group in (model, config, cache):
        group.update({name: value for name, value in changed.items() if name in group})
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config), **model),
        cache_config=SimpleNamespace(**cache),
        load_config=SimpleNamespace(load_format=changed.get("load_format", "auto")),
    )


def test_the_fingerprint_changes_with_all_that_decides_the_bits(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"weights")

    def fingerprint(folder: Path = tmp_path, builds: str = "1", layers: int = 64, **changed: Any) -> bytes:
        config = _config(folder, **changed)
        return kv_fingerprint(config, {"a": layers}, {"vllm": builds}, weights_digest(config))

    assert fingerprint() == fingerprint(other)
    changes: list[dict[str, Any]] = [
        {"dtype": "fp16"},
        {"cache_dtype": "fp8"},
        {"block_size": 32},
        {"rope_theta": 2e4},
        {"quantization": "awq"},
        {"builds": "2"},
        {"layers": 65},
        {"load_format": "dummy"},
    ]
    found = {fingerprint(**change) for change in changes} | {fingerprint()}
    (other / "model.safetensors").write_bytes(b"weighty")
    found.add(fingerprint(other))
    assert len(found) == len(changes) + 2


def test_weights_that_are_not_here_need_a_name(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="model_version"):
        weights_digest(_config(tmp_path / "nowhere"))


def test_the_sides_import_neither_vllm_nor_transformers() -> None:
    code = (
        "import sys; import quire.connect.vllm.scheduler_side, quire.connect.vllm.worker_side, "
        "quire.offload.open_tiers, quire.tiers.disk.disk_tier, quire.tiers.stack, quire.tiers.by_url; "
        "print(sorted({'vllm', 'transformers'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
