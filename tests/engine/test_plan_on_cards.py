"""`quire.plan(device=...)`: what fits on a graphics card, against the arithmetic of a start, without a card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import quantized_checkpoints
from support.fake_device import FakeDevice, registered
from support.state_layers import tiny_model
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from quire import LLM, plan
from quire.cli.main import app
from quire.config import EngineConfig
from quire.devices.cuda import open_device
from quire.engine.decode_bound import decode_bound
from quire.errors import ArgumentError, BackendError, UnsupportedModelError
from quire.spec.cards import CARDS, CONTEXT_BYTES, Card, check_device, parse_card, spare_bytes
from quire.weights.load import without_weights

GIB = 1 << 30


@pytest.mark.parametrize("name", CARDS)
def test_each_card_of_the_table_has_a_plan(name: str) -> None:
    card = CARDS[name]
    said = plan(device=name, dtype=card.dtypes[-1], context=64, concurrency=2)
    assert (said.fits, said.device, said.memory_bytes) == (True, name, card.total_bytes)
    assert f"on {name} ({card.title}, {card.architecture})" in str(said)
    on_card = [row for row in said.rows if row.part != "host"]
    assert said.total_bytes == sum(row.num_bytes for row in on_card)
    assert said.num_bytes("runtime") == CONTEXT_BYTES
    assert {row.name for row in said.rows if row.part == "host"} == {
        "words and merges",
        "python, torch, transformers",
    }
    assert said.decode_bound is not None
    assert "derived, not measured" in str(said)


def test_weights_are_dense_and_blocks_are_those_of_a_start() -> None:
    """A device with the bytes that the card leaves free opens as many blocks."""
    said = plan(device="h100", kv_memory="0.01%", context=512)
    model = without_weights().model
    parameters = {id(one): one.numel() * one.itemsize for one in (*model.parameters(), *model.buffers())}
    assert said.num_bytes("weights") == sum(parameters.values())

    class Loaded(FakeDevice):
        def free_bytes(self) -> int:
            card = CARDS["h100"]
            return (
                card.total_bytes - CONTEXT_BYTES - spare_bytes(card.total_bytes) - said.num_bytes("weights")
            )

    with registered(Loaded()), LLM(backend="fake", kv_memory="0.01%", max_model_len=512) as llm:
        assert (llm.num_blocks, llm.kv_memory_bytes) == (said.num_blocks, said.budget_bytes)
        assert said.max_concurrency == min(llm.max_num_full_sequences, 256)


def test_a_registered_device_holds_no_tokenizer_and_no_process() -> None:
    with registered() as device:
        said = plan(backend="fake", context=512, kv_memory="1MiB")
        assert said.memory_bytes == device.total_bytes()
        assert said.total_bytes < device.total_bytes()  # a process takes more
        assert (said.device, said.decode_bound) == ("fake", None)


def test_a_model_that_is_too_large_does_not_fit_and_has_no_bound(tmp_path: Path) -> None:
    Qwen3Config(**_SHAPE, num_hidden_layers=28).save_pretrained(tmp_path)
    weights = plan(tmp_path, device="h100", context=64).num_bytes("weights")
    need = weights + CONTEXT_BYTES + spare_bytes(GIB)
    assert plan(tmp_path, device=f"mine:{need + (64 << 20)}", context=64).fits
    small = plan(tmp_path, device=f"mine:{need - (1 << 20)}", context=64)
    assert (small.fits, small.decode_bound) == (False, None)
    assert "expected memory for weights of" in small.reason
    assert "free on mine" in small.reason


# -- the bound ---------------------------------------------------------------------------------------------

_SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16",
    "tie_word_embeddings": True,
}  # fmt: skip


def test_the_bound_is_the_bytes_of_a_step_by_the_bandwidth(tmp_path: Path) -> None:
    Qwen3Config(**_SHAPE, num_hidden_layers=28).save_pretrained(tmp_path)
    said = plan(tmp_path, device="mine:80GiB:3TB/s", context=1024, concurrency=256).decode_bound
    assert said is not None
    layer = 1024 * (2 * 16 + 2 * 8) * 128 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    weight_bytes = 2 * (28 * layer + 151936 * 1024 + 1024)
    kv_bytes = 256 * 1024 * 28 * 2 * 8 * 128 * 2
    assert (said.weight_bytes, said.kv_bytes, said.is_of_bandwidth) == (weight_bytes, kv_bytes, True)
    assert said.tokens_per_s == pytest.approx(256 / ((weight_bytes + kv_bytes) / 3e12))
    shared = plan(tmp_path, device="mine:80GiB:3TB/s", context=1024, concurrency=256, shared_prefix=1000)
    assert shared.decode_bound is not None
    assert shared.decode_bound.kv_bytes == kv_bytes // (256 * 1024) * (1000 + 256 * 24)
    assert plan(tmp_path, device="mine:80GiB", context=1024).decode_bound is None


def test_separate_embeddings_are_read_by_the_row(tmp_path: Path) -> None:
    bounds = []
    for tied in (True, False):
        shape: dict[str, Any] = {**_SHAPE, "tie_word_embeddings": tied}
        config = Qwen3Config(**shape, num_hidden_layers=2)
        config.save_pretrained(tmp_path)
        bounds.append(plan(tmp_path, device="h100", context=64, concurrency=1).decode_bound)
    assert bounds[0] == bounds[1]


def test_products_bound_a_large_batch_of_16_bit_numbers(tmp_path: Path) -> None:
    Qwen3Config(**_SHAPE, num_hidden_layers=2).save_pretrained(tmp_path)
    for dtype, is_of_bandwidth in (("bfloat16", False), ("float32", True)):
        unloaded = without_weights(tmp_path, dtype=dtype)
        slow = replace(CARDS["h100"], flops=1e12)
        bound = decode_bound(unloaded, unloaded.spec, slow, 16, 256, 0)
        assert bound is not None
        assert bound.is_of_bandwidth == is_of_bandwidth
        if not is_of_bandwidth:
            matrices = sum(one.numel() for one in unloaded.model.parameters() if one.dim() == 2)
            assert bound.tokens_per_s == pytest.approx(1e12 / (2 * matrices))
            assert "products of a step" in str(bound)


def test_a_token_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
    Qwen3MoeConfig(**_SHAPE, **experts, num_hidden_layers=2).save_pretrained(tmp_path)
    unloaded = without_weights(tmp_path)
    all_experts = 2 * 64 * 3 * 1024 * 256 * 2
    other = sum(one.numel() * one.itemsize for one in unloaded.model.parameters()) - all_experts
    for num_requests, share in ((1, 4 / 64), (64, 1 - (60 / 64) ** 64)):
        bound = decode_bound(unloaded, unloaded.spec, CARDS["h100"], 16, num_requests, 0)
        assert bound is not None
        assert bound.weight_bytes == pytest.approx(other + share * all_experts, rel=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "h1000"}, r"expected cpu, cuda, a card, one of b200, .* got 'h1000' - in `device`"),
        ({"device": "mine:many"}, "expected a size"),
        ({"device": "mine:4GiB:fast/s"}, "expected a size"),
        ({"device": "mine:1GiB"}, "more than the 1024 MiB"),
        ({"device": 3}, "expected the name of a device, got 3"),
        ({"memory": "8GiB"}, "expected no memory of this machine .* in `memory`"),
        ({"storage": "virtual"}, "expected storage=\"paged\" on device 'h100', got 'virtual'"),
        ({"backend": "python"}, "expected a back end of a card on device 'h100'"),
        ({"device": "t4"}, "expected a model of float32, float16 on device 't4', got bfloat16"),
    ],
)
def test_a_card_refuses_options_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        plan(**{"device": "h100", **options})


def test_a_registered_device_refuses_formats_that_a_start_refuses() -> None:
    with registered():
        for refuse in (plan, LLM):
            with pytest.raises(ArgumentError, match=r"expected a format of K and V .* got int8"):
                refuse(backend="fake", kv_dtype="int8", kv_memory="1MiB")


def test_a_card_refuses_a_model_that_a_start_refuses(tmp_path: Path) -> None:
    own = AutoConfig.for_model("gpt_neo", num_layers=2, attention_types=[[["global"], 2]])
    own.save_pretrained(tmp_path / "own")
    with pytest.raises(UnsupportedModelError, match="its own forward runs in host memory only"):
        plan(tmp_path / "own", device="h100")


def test_a_step_reads_quantized_weights_as_codes(tmp_path: Path) -> None:
    awq = quantized_checkpoints.FORMATS["awq"]
    quantized_checkpoints.save(tmp_path, quantized_checkpoints.tiny(), *awq)
    codes, dense = (plan(tmp_path, device="h100", context=64, weights=weights) for weights in (None, "bf16"))
    rounded = plan(device="h100", context=64, weights="int4")
    assert codes.num_bytes("weights") < dense.num_bytes("weights")
    assert {row.name for row in rounded.rows if row.part == "weights"} >= {"norms and others"}
    for said in (codes, dense, rounded):
        assert said.decode_bound is not None
        embeddings = sum(row.num_bytes for row in said.rows if row.name == "embeddings")
        assert said.decode_bound.weight_bytes == pytest.approx(
            said.num_bytes("weights") - embeddings, rel=0.02
        )


def test_states_take_their_memory_at_once(tmp_path: Path) -> None:
    """On a card blocks and state slots do not exchange memory, so the slots of the start are the most."""
    tiny_model("bamba").save_pretrained(tmp_path)
    options: dict[str, Any] = {"context": 16, "kv_memory": 4 << 20, "max_num_seqs": 4096}
    said, here = plan(tmp_path, device="h100", **options), plan(tmp_path, backend="python", **options)
    assert said.num_state_slots == here.num_state_slots
    assert said.max_concurrency == said.num_state_slots < here.max_concurrency
    unloaded = without_weights(tmp_path)
    bound = decode_bound(unloaded, unloaded.spec, CARDS["h100"], 16, 3, 0)
    assert bound is not None  # a step reads and writes each state
    assert bound.kv_bytes == 3 * (unloaded.spec.bytes_for(16) + 2 * unloaded.spec.bytes_per_state)


# -- this machine's card -----------------------------------------------------------------------------------


def test_without_a_card_of_its_own_a_plan_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"expected a device 'cuda' that torch .* can use, got none"):
        plan(device="cuda")


def test_its_own_card_is_planned_by_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("mem_get_info", lambda device: ((30 + device.index) * GIB, 140 * GIB)),
        ("memory_reserved", lambda device: 0),
        ("memory_allocated", lambda device: 0),
        ("get_device_properties", lambda device: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(open_device, "torch_device_of", open_device.torch_device_of.__wrapped__)
    options: dict[str, Any] = {"backend": "torch", "context": 64, "concurrency": 1}
    for said in (
        plan(device="cuda:1", **options),
        plan(config=EngineConfig(device="cuda:1", backend="torch"), context=64, concurrency=1),
    ):
        assert (said.device, said.memory_bytes) == ("cuda:1", 140 * GIB)
        assert said.num_bytes("runtime") == 109 * GIB + spare_bytes(140 * GIB)
        assert said.decode_bound is not None
        assert said.decode_bound.bytes_per_s == CARDS["h200"].bytes_per_s
    properties.name = "NVIDIA H20"  # which the table does not have
    assert plan(device="cuda:1", **options).decode_bound is None


# -- names and the command ---------------------------------------------------------------------------------


def test_names_and_sizes() -> None:
    for text in ("H100", " h100 ", "rtx4090", "RTX 4090", "rtx-4090"):
        assert parse_card(text) is CARDS[text.strip().lower().removeprefix("rtx").strip(" -")]
    assert parse_card("h100:40GiB") == Card("h100", "h100", 40 * GIB)
    assert parse_card("a b:40GiB:1.5TB/s") == Card("a b", "a b", 40 * GIB, 1.5e12)
    assert [check_device(text) for text in ("cpu", "cuda", "cuda:3", "h100")] == [
        "cpu",
        "cuda",
        "cuda:3",
        None,
    ]
    titles = [card.title for card in CARDS.values()]
    assert len(set(titles)) == len(titles)


def test_the_command_takes_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> tuple[Any, str]:
        status = app(["plan", "embedded", "--context", "64", *more], standalone_mode=False)
        return status, capsys.readouterr().out

    status, out = run("--device", "a100", "--json", "--concurrency", "2")
    said = json.loads(out)
    assert (status or 0, said["device"], said["fits"]) == (0, "a100", True)
    assert said["decode_bound"]["tokens_per_s"] > 0
    status, out = run("--device", "mine:2GiB", "--concurrency", "100000")
    assert status == 1
    assert "does not fit" in out
    assert "--max-num-seqs" in out
    assert json.loads(run("--device", "cpu", "--json")[1])["device"] in ("native", "python")
