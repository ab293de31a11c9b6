"""`kv_dtype=`: K and V in another format than the model computes in, on every storage and through the tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.architectures import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.devices import device
from quire.devices.reference_device import ReferenceDevice
from quire.engine.serving_plan import plan
from quire.errors import ArgumentError
from quire.spec import KVSpec, LayerSpec, Span
from quire.spec.kv_dtype import layers_left, with_kv_dtype

PROMPT = [(7 * i) % 60 + 2 for i in range(100)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def _llm(model: Any, **options: Any) -> LLM:
    return LLM((model, None), **{"kv_memory": "2MiB", "backend": "python", "max_model_len": 256, **options})


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("kv_dtype", "times"), [("int8", 1.9), ("k8v4", 2.4), ("int4", 3.4)])
def test_a_budget_holds_more_tokens_than_of_16_bits(kv_dtype: str, times: float, head_dim: int) -> None:
    spec = KVSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=head_dim)
    coded = with_kv_dtype(spec, kv_dtype)
    assert spec.bytes_per_token >= times * coded.bytes_per_token
    assert coded.kv_dtype == coded.kv_dtype_by_layers == kv_dtype
    assert coded.in_model_dtype == spec
    assert spec == with_kv_dtype(spec, "auto") == with_kv_dtype(spec, "bf16")


STORAGES = ("paged", "contiguous", "growing", "virtual")
TOLD = {
    "int8": "int8",
    "k8v4,first:1=int4": "int4 (layer 0) and k8v4 (layer 1)",
    "int8,first:1=fp32": "float32 (layer 0) and int8 (layer 1)",
}


@pytest.mark.parametrize(
    ("kv_dtype", "storage"),
    [*((name, storage) for name in list(TOLD)[:2] for storage in STORAGES), ("int8,first:1=fp32", "paged")],
)
def test_it_serves_on_every_storage(storage: str, kv_dtype: str) -> None:
    model = tiny("qwen3")
    with _llm(model, storage=storage) as llm:
        [exact] = llm.generate([PROMPT], PARAMS)
    with _llm(model, storage=storage, kv_dtype=kv_dtype) as llm:
        assert llm._opened.storage is not None
        llm._opened.storage.fill(float("nan"))
        [got] = llm.generate([PROMPT], PARAMS)
        assert f" in {TOLD[kv_dtype]}, " in llm.capacity
        assert llm.monitor.stats()["kv_dtype"] == TOLD[kv_dtype]
    assert got.outputs[0].token_ids == exact.outputs[0].token_ids


def test_bytes_are_those_that_the_system_tells_of() -> None:
    with _llm(tiny("qwen3"), kv_dtype="int8", prefault=True) as llm:
        stats = llm.monitor.stats()
    assert stats["kv_committed_bytes"] == pytest.approx(stats["kv_memory_bytes"], rel=0.01)


def test_a_tier_tells_formats_apart(tmp_path: Path) -> None:
    model, found = tiny("qwen3"), []
    for kv_dtype in ("int8", "auto", "int8,first:1=k8v4", "int8"):
        with _llm(model, kv_dtype=kv_dtype, disk_cache=tmp_path, cache_write="through") as llm:
            [answer] = llm.generate([PROMPT], PARAMS)
            found.append((answer.outputs[0].token_ids, answer.num_cached_tokens))
    assert [cached for _, cached in found] == [0, 0, 0, 96]
    assert found[0][0] == found[-1][0]


def test_what_cannot_have_it_is_refused_with_what_runs() -> None:
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32")
    with pytest.raises(ArgumentError, match="expected K and V in the model's dtype, float32"):
        with_kv_dtype(spec, "bf16")
    latent = KVSpec((LayerSpec(Span(), 1, 40, 32, latent=True),), name="deepseek_v3")
    with pytest.raises(ArgumentError, match=r"got deepseek_v3 with latents \(layer 0\).*take auto"):
        with_kv_dtype(latent, "int8")
    with pytest.raises(ArgumentError, match=r"heads of 20 elements \(layer 0\), not a multiple of 8"):
        with_kv_dtype(KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=20), "int8")
    config = AutoConfig.for_model(
        *("gpt_neo",),
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        vocab_size=64,
        attention_types=[[["global"], 1]],
    )
    with pytest.raises(ArgumentError, match=r"own forward \(gpt_neo\).*take auto"):
        _llm(AutoModelForCausalLM.from_config(config).eval(), kv_dtype="int8")


def _by_layer(spec: KVSpec, kv_dtype: Any) -> list[str]:
    return [layer.kv_dtype("") for layer in with_kv_dtype(spec, kv_dtype).layers]


def test_layers_have_formats_of_their_own() -> None:
    full, window = LayerSpec(Span(), 1, 64, 64), LayerSpec(Span("window", 8), 1, 64, 64)
    shared = LayerSpec(Span(), 1, 64, 64, shares_kv_with=0)
    spec = KVSpec((full, window, window, shared, full, full))
    given = {"last:1": "int4", "default": "int8", 2: "k8v4", "window": "bf16"}
    assert _by_layer(spec, given) == ["int8", "", "k8v4", "", "int8", "int4"]
    assert _by_layer(spec, "int8,last:1=int4,2=k8v4,window=bf16") == _by_layer(spec, given)
    assert _by_layer(spec, "first:4=k8v4,last:2=int8") == ["k8v4", "k8v4", "k8v4", "", "k8v4", "int8"]
    assert _by_layer(spec, "0=auto,last:2=int4") == ["", "", "", "", "int4", "int4"]
    told = "int8 (layers 0, 4), bfloat16 (layer 1), k8v4 (layer 2) and int4 (layer 5)"
    assert with_kv_dtype(spec, given).kv_dtype_by_layers == told
    for wrong, says in [
        ({"3": "int8"}, "a layer that stores K and V of its own, 0-2, 4-5, got 3"),
        ({"first:0": "int8"}, "got 'first:0'"),
        (
            "int8,windows=bf16",
            "expected default, first:N, last:N, window or the number of a layer, got 'windows'",
        ),
        ("int8,int4", "expected each rule once, got 'default' twice"),
        ("first:2=fp32", "model's dtype, bfloat16.*got float32"),
        ("int8,window=", "expected one of auto, .*got ''"),
    ]:
        with pytest.raises(ArgumentError, match=says):
            with_kv_dtype(spec, wrong)


def test_layers_that_cannot_stay_as_they_are_beside_others_that_can() -> None:
    latent = LayerSpec(Span(), 1, 40, 32, latent=True)
    spec = KVSpec((latent, LayerSpec(Span(), 1, 64, 64)))
    assert _by_layer(spec, "int8") == ["", "int8"]
    assert [*layers_left(spec, "int8")] == [0]
    with pytest.raises(ArgumentError, match=r"latents \(layer 0\)"):
        with_kv_dtype(spec, {0: "int8", "default": "int8"})


def test_a_back_end_that_does_not_know_the_format_is_refused() -> None:
    class Plain(ReferenceDevice):
        name = "plain"
        kv_formats = ()

    device.register("plain", Plain)
    try:
        with pytest.raises(
            ArgumentError, match="backend 'plain' attends to, the model dtype alone, got int8"
        ):
            _llm(tiny("qwen3"), kv_dtype="int8", backend="plain")
    finally:
        device.unregister("plain")


def _with_far_keys(name: str) -> Any:
    """A tiny model of which one channel of keys, in the slowest rotary pair, is 145 on average in every head."""
    model = tiny(name)
    keys = model.model.layers[0].self_attn.k_proj
    heads = keys.bias.data.view(model.config.num_key_value_heads, -1)
    heads[:, heads.shape[1] // 2 - 1] += 145
    return model


def test_what_all_keys_have_in_common_is_taken_off_them() -> None:
    model = _with_far_keys("qwen2")
    with _llm(model) as llm:
        [exact] = llm.generate([PROMPT], PARAMS)
    with _llm(model, kv_dtype="int8") as llm:
        assert [*llm._opened.prepared.key_offsets] == [0]
        [got] = llm.generate([PROMPT], PARAMS)
    assert got.outputs[0].token_ids == exact.outputs[0].token_ids


def test_a_layer_with_sinks_stays_as_it_is_where_its_keys_need_that(caplog: pytest.LogCaptureFixture) -> None:
    with _llm(_with_far_keys("gpt_oss"), kv_dtype="int8") as llm:
        assert not llm._opened.prepared.key_offsets
        assert llm.spec.kv_dtype == "float32 and int8"
        assert "in float32 (layer 0) and int8 (layer 1)" in llm.capacity
        assert "layers 0 keep K and V in float32" in caplog.text
        [got] = llm.generate([PROMPT], PARAMS)
        assert len(got.outputs[0].token_ids) == PARAMS.max_tokens


def test_the_plan_counts_what_the_start_has() -> None:
    options: dict[str, Any] = {
        "kv_dtype": {"default": "k8v4", "last:1": "int4"},
        "kv_memory": "2MiB",
        "backend": "python",
        "max_model_len": 256,
    }
    found = plan(None, **options)
    with LLM(None, **options) as llm:
        assert (found.num_blocks, found.budget_bytes) == (llm.num_blocks, llm.kv_memory_bytes)
    assert "K and V in k8v4 (layers 0-" in str(found)
    with pytest.raises(ArgumentError, match=r"model's dtype, bfloat16.*got float32"):
        plan(None, **{**options, "kv_dtype": "fp32"})
