"""The recipe of an attention back end: one file that registers it, and an engine runs on it, with hits and chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.architectures import tiny

from quire import LLM, SamplingParams
from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.devices import Device, device_of, register
from quire.devices.device import unregister
from quire.memory import PagedStorage
from quire.spec import KVSpec

PROMPT = [(7 * i) % 60 + 2 for i in range(70)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[Device]:
    from recipes.row_by_row import RowByRow

    register(RowByRow.name, RowByRow)
    yield device_of(RowByRow.name)
    unregister(RowByRow.name)


def test_it_computes_what_the_reference_does(registered: Device) -> None:
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=2, head_dim=8, dtype="float32")
    storage, rng = PagedStorage(spec, 6, 4), torch.Generator().manual_seed(1)
    storage.fill(float("nan"))
    view, slots = storage.view(0), torch.arange(17)
    k, v = (torch.randn(17, 2, 8, generator=rng) for _ in range(2))
    registered.write(view, k, v, slots)
    query = torch.randn(8, 4, 8, generator=rng)
    plan = attention_batch([0, 7, 8], [11, 5], [[0, 1, 2], [3, 4, -1]], 4)
    options = AttentionOptions(0.3)
    torch.testing.assert_close(
        device_of(registered.name).run(view, query, plan, options),
        reference_attention.run(view, query, plan, options),
    )


def test_an_engine_runs_on_it(registered: Device) -> None:
    model, answers = tiny("qwen3"), []
    for name in ("python", registered.name):
        options = {"kv_memory": "4MiB", "block_size": 4, "max_batch_tokens": 11}
        with LLM((model, None), backend=name, **options) as llm:
            for _ in range(2):
                [answer] = llm.generate([PROMPT], PARAMS)
                answers.append((answer.outputs[0].token_ids, answer.num_cached_tokens))
    assert answers[:2] == answers[2:]
    assert answers[3][1] == len(PROMPT) - 1
