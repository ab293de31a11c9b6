"""`EngineRun` on the virtual storage: pages of 4 KiB, blocks poisoned and handed out in shuffled order."""

from __future__ import annotations

from types import SimpleNamespace

from support.engine_run import EngineRun, _Recording, _shuffle
from transformers import PreTrainedModel

from quire import Cache
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.engine.runner import Runner
from quire.memory import VirtualStorage
from quire.memory.virtual.virtual_storage import virtual_block_size
from quire.model.sequential_model import prepare
from quire.scheduler.request_validator import ServedModel
from quire.weights.load import load


class VirtualRun(EngineRun):
    """As `EngineRun`; the pool has `num_blocks` blocks."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        backend: str,
        num_blocks: int,
        max_batch_tokens: int = 11,
        max_num_seqs: int = 4,
        prefix_caching: bool = True,
        step_tokens: int | None = None,
    ) -> None:
        self.prompts, self.max_tokens = prompts, max_tokens
        loaded = load((model, None))
        self.prepared = prepare(loaded, backend=backend)
        max_model_len = max(map(len, prompts)) + max_tokens
        self.storage = VirtualStorage(
            loaded.spec,
            num_blocks,
            virtual_block_size(loaded.spec, 4096),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_blocks=num_blocks,
            step_tokens=step_tokens,
        )
        self.storage.fill(float("nan"))
        cache = Cache(
            loaded.spec,
            num_blocks=num_blocks,
            block_size=self.storage.block_size,
            prefix_caching=prefix_caching,
            backend=backend,
        )
        _shuffle(cache, num_blocks)
        self._recording = _Recording(Runner(self.prepared, self.storage))
        engine = Engine(
            EngineParts(self._recording, cache),
            ServedModel(loaded.vocab_size, max_model_len, sampling_defaults=loaded.sampling_defaults),
            limits=StepLimits(max_batch_tokens, max_num_seqs),
        )
        self.llm = SimpleNamespace(engine=engine)  # type: ignore[assignment]

    def close(self) -> None:
        self.prepared.restore()
        self.storage.close()
