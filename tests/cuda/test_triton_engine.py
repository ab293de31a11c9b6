"""An engine on the Triton kernels, under the interpreter: tokens of `model.generate`, and the same bits in any company.

Cold, hit, in chunks, preempted and swapped; decode steps run as graphs (`test_decode_graphs.Replays`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from support.engine_run import EngineRun
from support.generate_oracle import PROMPTS, expected

from quire.devices import device_of


class _Replays:
    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        result = compute()

        def replay() -> None:
            with torch.inference_mode():
                result.copy_(compute())

        return result, replay


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_of("triton"), "graphs", _Replays())


def run(name: str, prompts: list[list[int]], num_tokens: int, **options: Any) -> list[Any]:
    options = {"room": 8.0} | options
    run = EngineRun(expected(name)[0], prompts, num_tokens, backend="triton", **options)
    with run.llm:
        return run.answer()


def test_alone_in_company_and_hit(graphs: None) -> None:
    """A decode beside a prompt's chunk, a prompt that is found in part, and each request alone."""
    which, num_tokens = (2, 4, 6), 2
    together = run("qwen3", [PROMPTS[index] for index in which], num_tokens)
    tokens = expected("qwen3")[1]
    assert [answer.token_ids for answer in together] == [tokens[index][:num_tokens] for index in which]
    assert sum(answer.num_cached_tokens for answer in together) > 0
    alone = run("qwen3", [PROMPTS[4]], num_tokens)[0]
    assert torch.equal(alone.logits, together[1].logits)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_every_way_of_serving(name: str, graphs: None) -> None:
    _, tokens, _ = expected(name)
    num_tokens = len(tokens[0])
    whole = run(name, PROMPTS, num_tokens)
    assert [answer.token_ids for answer in whole] == tokens
    pressed = run(name, PROMPTS, num_tokens, room=1.0, preemption="swap", swap_memory="4MiB")
    for ours, theirs in zip(pressed, whole, strict=True):
        assert torch.equal(ours.logits, theirs.logits)
