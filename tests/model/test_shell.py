"""What `making_shells` answers on the meta device is what torch answers there; elsewhere it changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quire.model.shell import making_shells

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arange": lambda _: torch.arange(0, 7, 2),
    "arange of one float": lambda _: torch.arange(5.0),
    "arange, dtype": lambda _: torch.arange(0, 8, 2, dtype=torch.bfloat16),
    "quotient": lambda x: x / 3,
    "quotient by a float": lambda x: x.div(2.5),
    "quotient of a number": lambda x: 1 / x,
    "power of a number": lambda x: 3 ** x.abs(),
    "power of a float": lambda x: 10000.0**x,
    "rounded quotient": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "quotient of tensors": lambda x: x / x,
    "like": torch.empty_like,
    "like, dtype": lambda x: torch.empty_like(x, dtype=torch.float16),
    "transposed like": lambda x: torch.empty_like(x.t()),
    "on the CPU": lambda x: torch.empty_like(x, device="cpu"),
}


def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", CALLS)
def test_as_torch_on_the_meta_device(name: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        x = torch.empty(3, 5, dtype=dtype)
        expected = CALLS[name](x)
    with making_shells(), torch.device("meta"):
        assert kind(CALLS[name](x)) == kind(expected)


def test_nothing_else_changes_on_the_cpu() -> None:
    x = torch.arange(15.0).reshape(3, 5) + 1
    with making_shells():
        for name, call in CALLS.items():
            assert kind(call(x)) == kind(call(x.clone())), name
        assert torch.equal(1 / x, x.reciprocal())
        assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))
        torch.manual_seed(1)
        drawn = torch.nn.init.normal_(torch.zeros(4))
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.nn.init.normal_(torch.zeros(4)))


def test_an_embedding_has_no_memory_and_its_shape() -> None:
    with making_shells(), torch.device("meta"):
        embedding = torch.nn.Embedding(7, 3)
    weight = embedding.weight
    assert kind(weight) == ((7, 3), torch.float32, torch.device("meta"), (3, 1), True)


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "bloom", "olmo2", "mixtral", "phi3", "opt"],
)
def test_a_model_is_loaded_as_without(model_type: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "n_embd": 16, "n_layer": 2, "n_head": 2,
             "ffn_dim": 24, "word_embed_proj_dim": 16, "head_dim": 8, "pad_token_id": 0}  # fmt: skip
    config = AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with making_shells():
        found = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    for ours, theirs in (
        (found.named_parameters(), expected.named_parameters()),
        (found.named_buffers(), expected.named_buffers()),
    ):
        tensors = dict(ours)
        for name, tensor in theirs:
            assert torch.equal(tensors.pop(name), tensor), name
        assert not tensors


@pytest.mark.ci
def test_a_start_imports_no_sympy() -> None:
    program = (
        "import sys\nfrom quire import LLM, SamplingParams\n"
        "with LLM(kv_memory='16MiB', max_model_len=64) as llm:\n"
        "    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))\n"
        "assert 'sympy' not in sys.modules and 'torch._dynamo.convert_frame' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
