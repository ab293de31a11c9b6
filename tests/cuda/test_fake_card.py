"""The fake card is a card: it computes, refuses what CUDA refuses, and keeps its memory from the host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.card import CopyCounts, card, counted, limited_memory, lost_card
from support.generate_oracle import PROMPTS
from support.state_layers import tiny_model
from transformers import PreTrainedModel

SUPPORT = Path(__file__).parents[1]
OTHER_DEVICE = (
    "on the same device|in the same device|device as the indexed tensor|to have the same device type"
)


@pytest.fixture
def device() -> torch.device:
    return card()


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids: Any = torch.tensor([prompt]).to(model.device)
    options = {"max_new_tokens": 8, "do_sample": False}
    with torch.inference_mode():
        output: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_moe", "mamba2"])
def test_a_model_generates_the_tokens_of_the_cpu(name: str, device: torch.device) -> None:
    model = tiny_model(name) if name == "mamba2" else tiny(name)
    expected = [greedy(model, prompt) for prompt in PROMPTS[2:4]]
    model.to(device)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device}
    with counted() as counts:
        assert [greedy(model, prompt) for prompt in PROMPTS[2:4]] == expected
    assert counts.launches > 0


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda card, host: card + host,
    "add to the host": lambda card, host: host.add_(card),
    "multiply matrices": lambda card, host: card @ host,
    "concatenate": lambda card, host: torch.cat([card, host]),
    "choose": lambda card, host: torch.where(card > 1, card, host),
    "index the host": lambda card, host: host[card[0].long()],
    "embed": lambda card, host: torch.nn.functional.embedding(host.long(), card),
    "embed a scalar": lambda card, host: torch.nn.functional.embedding(host[0, 0].long(), card),
    "normalize": lambda card, host: torch.nn.functional.layer_norm(card, (2,), host[0]),
    "convolve": lambda card, host: torch.nn.functional.conv1d(card, host[None]),
    "attend": lambda card, host: torch.nn.functional.scaled_dot_product_attention(
        *(tensor[None, None] for tensor in (card, host, card))
    ),
    "write rows": lambda card, host: card.index_copy_(0, torch.tensor([0, 1]), card + host.to(card)),
    "update a host's scalar": lambda card, host: host[0, 0].add_(card[0, 0]),
}


@pytest.mark.parametrize("operation", MIXED)
def test_tensors_of_two_devices_do_not_mix(operation: str, device: torch.device) -> None:
    host = torch.ones(2, 2)
    MIXED[operation](torch.ones(2, 2), host)  # right on one device
    with pytest.raises((RuntimeError, IndexError), match=OTHER_DEVICE):
        MIXED[operation](torch.ones(2, 2, device=device), host)


def test_scalars_and_indices_of_the_host_are_taken(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    with counted() as counts:
        results = [x + torch.tensor(1.0), x.masked_fill(x > 1, torch.tensor(9.0)), x // 2]
    assert (counts.to_card, counts.to_host) == (0, 0)
    assert [result.tolist() for result in results] == [[1, 2, 3, 4], [0, 1, 9, 9], [0, 0, 1, 1]]
    with counted() as counts:
        taken = x[torch.tensor([3, 0])]
    assert (counts.to_card, counts.to_card_bytes) == (1, 16)
    assert taken.tolist() == [3.0, 0.0]
    with counted() as counts:
        x[torch.tensor([3, 0])] = 5
    assert (counts.to_card, counts.to_card_bytes) == (1, 16)
    assert x.tolist() == [5.0, 1.0, 2.0, 5.0]


def test_views_share_memory_and_results_do_not(device: torch.device) -> None:
    x = torch.zeros(3, 4, device=device)
    x.t()[1:3, 0] = 7
    x.view(torch.int32)[2, 3:] = 1
    other = x.clone()
    other.fill_(5)
    assert x[0].tolist() == [0, 7, 7, 0]
    assert x[1].data_ptr() - x.data_ptr() == 16
    assert x.view(torch.int32)[2, 3].item() == 1
    out = torch.empty(0, device=device)
    torch.add(x, x, out=out)
    assert out[0].tolist() == [0, 14, 14, 0]


COPIES: dict[str, tuple[Callable[[torch.Tensor], Any], CopyCounts]] = {
    "to the card": (
        lambda x: torch.ones(4).to(x.device),
        CopyCounts(to_card=1, to_card_bytes=16),
    ),
    "to the host": (lambda x: x.cpu(), CopyCounts(to_host=1, to_host_bytes=16, waits=1)),
    "a list": (lambda x: x.tolist(), CopyCounts(to_host=1, to_host_bytes=16, waits=1)),
    "an item": (lambda x: x[0].item(), CopyCounts(to_host=1, to_host_bytes=4, waits=1)),
    "a condition": (lambda x: bool(x[0] > 0), CopyCounts(to_host=1, to_host_bytes=1, waits=1)),
    "a mask": (lambda x: x[x > 0], CopyCounts(to_host=1, to_host_bytes=8, waits=1)),
}


@pytest.mark.parametrize("what", COPIES)
def test_copies_and_waits_are_counted(what: str, device: torch.device) -> None:
    x = torch.ones(4, device=device)
    action, expected = COPIES[what]
    with counted() as counts:
        action(x)
    assert replace(counts, launches=0) == expected


def test_late_copies_are_there_after_a_wait(device: torch.device) -> None:
    x, staging = torch.ones(4, device=device), torch.empty(4).pin_memory()
    event = torch.Event("card")
    with counted() as counts:
        staging.copy_(x, non_blocking=True)
        event.record()
        assert staging.isnan().all()
        event.synchronize()
    assert staging.tolist() == [1.0] * 4
    assert (counts.to_host, counts.waits) == (1, 1)
    for change in (False, True):
        with counted() as counts:
            x.copy_(staging, non_blocking=True)
            if change:
                staging[0] = 3
            torch.accelerator.synchronize()
        assert counts.races == change


def test_memory_is_limited_and_given_back(device: torch.device) -> None:
    module: Any = torch.get_device_module(device)
    used = module.memory_allocated()
    x = torch.zeros(1000, device=device)
    assert module.memory_allocated() - used == 4096
    with limited_memory(used + 8192), pytest.raises(torch.OutOfMemoryError, match="card out of memory"):
        torch.zeros(1025, device=device)
    del x
    assert module.memory_allocated() == used
    assert torch.empty(1000, device=device).isnan().all()


def test_a_lost_card_fails_every_call(device: torch.device) -> None:
    module: Any = torch.get_device_module(device)
    x = torch.ones(4, device=device)
    calls: list[Callable[[], Any]] = [
        x.cpu,
        x.sum,
        x.tolist,
        lambda: torch.ones(2).to(device),
        module.synchronize,
    ]
    with lost_card():
        for call in calls:
            with pytest.raises(RuntimeError, match="illegal memory access"):
                call()
        used = module.memory_allocated()
        y = x[1:]
        del x, y, calls
        assert module.memory_allocated() == used - 512


@pytest.mark.parametrize("access", ["read", "write"])
def test_the_host_cannot_reach_an_address(access: str, device: torch.device) -> None:
    script = f"""
import ctypes, faulthandler, sys
import torch
from support.card import card
faulthandler.enable()
x = torch.ones(4, device=card())
data = (ctypes.c_char * 16)()
addresses = [ctypes.addressof(data), x.data_ptr()]
print("begun", flush=True)
ctypes.memmove(*(addresses if {access == "read"} else addresses[::-1]), 16)
print("reached")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=SUPPORT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "begun\n", done.stderr
    assert done.returncode == -11
    assert 'File "<string>", line 10' in done.stderr
