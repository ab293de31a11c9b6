"""A card that has failed ends the engine: each request gets one clear error, and the engine can be closed."""

from __future__ import annotations

from typing import Any

import pytest
from support.generate_oracle import PROMPTS, expected

from quire import LLM, SamplingParams
from quire.devices import device_of
from quire.errors import DeviceLostError

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_all_requests_end_with_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of("torch")
    lost: list[bool] = []
    monkeypatch.setattr(device, "is_lost", lambda: bool(lost))
    with LLM((expected("qwen3")[0], None), backend="torch", kv_memory="4MiB", max_num_seqs=1) as llm:
        assert len(llm.generate([PROMPTS[1]], GREEDY)) == 1
        monkeypatch.setattr(device, "compute", fail)
        lost.append(True)
        for prompts in (PROMPTS[:3], PROMPTS[:1]):  # later ones too
            with pytest.raises(
                DeviceLostError, match=r"got one that fails every call .*illegal memory access"
            ):
                llm.generate(prompts, GREEDY)
        assert llm.stats()["num_running"] == llm.stats()["num_waiting"] == 0
        llm.cache.check()


def test_an_error_of_a_step_alone_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of("torch")
    with LLM((expected("qwen3")[0], None), backend="torch", kv_memory="4MiB") as llm:
        with monkeypatch.context() as patched:
            patched.setattr(device, "compute", fail)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                llm.generate(PROMPTS[:2], GREEDY)
        assert [output.outputs[0].token_ids for output in llm.generate([PROMPTS[1]], GREEDY)] == [
            expected("qwen3")[1][1][:6]
        ]
