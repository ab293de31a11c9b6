"""`DraftModel`: the proposer of `speculation="model:PATH"`, drafts of a smaller model with the same tokenizer.

It has a storage and a cache of its own, within the engine's memory. A text's sequence there is opened at its first
proposal and takes the hit of its namespace; the prompt is computed in chunks, one a step, and is findable from then on.
Then the sequence is withdrawn (`KVCache.withdraw`): the drafts behind it are computed like known tokens, found by no
text, and rewound to the tokens that the engine's model has drawn. All texts of a step draft together, one token a
round: the likeliest one, or of a request that samples the one that it would draw from the draft model's logits, with
its own random number of the position.

Where memory does not suffice, the sequences of texts outside of the step are closed, and then its last texts get no
draft. No request waits for it.

Invariant
    D1  a draft is computed from its own text alone; a hit is of its own namespace.

Cost: a forward of the draft model a round, and one of the text that it has not computed yet. The seconds of rounds are
measured, so that they count against the drafts that they give. For the engine's thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.protocol import CacheSequence, KVCache
from quire.config import EngineConfig
from quire.engine.draft_memory import check_rewinds, divide_memory, draft_config, errors_of_draft
from quire.engine.engine_parts import StepRunner
from quire.engine.kv_capacity import kv_layout
from quire.engine.open_model import OpenModel, open_model
from quire.engine.open_storage import device_of, open_storage, storage_of
from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.sampling.sampler import draw_token
from quire.scheduler.step_costs import StepCosts
from quire.sizes import format_size
from quire.step import Batch, Int64Array, StepRefusedError

if TYPE_CHECKING:
    import torch

__all__ = ["DraftModel", "ModelDrafter", "open_draft_model"]

_NONE: Int64Array = np.empty(0, np.int64)
_log = logging.getLogger("quire")


class ModelDrafter:
    """The drafts of one text, see `Drafter`."""

    def __init__(self, model: DraftModel, token_ids: Sequence[int], namespace: bytes) -> None:
        self._model = model
        self.namespace = namespace
        self.text = list(token_ids)
        self.is_readable = model.reads(token_ids)
        self.sequence: CacheSequence | None = None
        self.num_known = 0  # tokens of the text that the sequence knows; its drafts are behind them
        self.drafts: list[int] = []
        self._drawing: tuple[SamplingParams, int, int] | None = (
            None  # params, seed and index of a request that samples
        )

    def draw_like(self, params: SamplingParams, seed: int, index: int) -> None:
        if params.temperature:
            self._drawing = params, seed, index

    def next_draft(self, logits: torch.Tensor, likeliest: int) -> int:
        """logits: [vocab] behind the text and the drafts so far."""
        if self._drawing is None:
            return likeliest
        return draw_token(logits, *self._drawing, position=self.num_known + len(self.drafts))

    def extend(self, token_ids: Sequence[int]) -> None:
        self.text += token_ids
        self.is_readable = self.is_readable and self._model.reads(token_ids)

    def propose(self, num_tokens: int) -> Sequence[int]:
        return self._model.propose_all([(self, num_tokens)])[0]

    def close(self) -> None:
        self._model.release(self)


class DraftModel:
    """See the module's text, `Proposer` and `ProposesTogether`.

    cache: of the storage to which the runner's model is attached. vocab_size: of the draft model; texts with other ids
    get no drafts. num_ids: of the engine's model: drafts are below it. max_model_len: of the draft model; longer texts
    get no drafts. chunk: tokens of a step.
    """

    def __init__(
        self,
        runner: StepRunner,
        cache: KVCache,
        *,
        vocab_size: int,
        num_ids: int,
        max_model_len: int,
        chunk: int,
    ) -> None:
        self._runner, self._cache = runner, cache
        self._vocab_size, self._num_ids = vocab_size, min(vocab_size, num_ids)
        self._max_model_len, self._chunk = max_model_len, chunk
        self._open: dict[ModelDrafter, None] = {}  # those with a sequence, the last used at the end
        self._closed_ids: list[int] = []
        self._costs = StepCosts()

    def open(self, token_ids: Sequence[int], namespace: bytes | None) -> ModelDrafter:
        """See `Proposer.open`."""
        return ModelDrafter(self, token_ids, os.urandom(16) if namespace is None else namespace)

    def forget(self, namespace: bytes) -> None:
        """See `Proposer.forget`."""
        if self._cache.prefix_caching:
            self._cache.drop([], namespace=namespace)

    def reads(self, token_ids: Sequence[int]) -> bool:
        """Whether the draft model has all of these ids."""
        return max(token_ids, default=0) < self._vocab_size

    def round_seconds(self, num_sequences: int) -> float:
        """See `ProposesTogether.round_seconds`."""
        seconds = self._costs.seconds(np.array([num_sequences]))
        return 0.0 if seconds is None else float(seconds[0])

    def propose_all(self, wanted: Sequence[tuple[ModelDrafter, int]]) -> list[list[int]]:
        """See `ProposesTogether.propose_all`."""
        left = [
            (drafter, min(count, self._max_model_len - len(drafter.text)))
            for drafter, count in wanted
            if drafter.is_readable and len(drafter.text) < self._max_model_len
        ]
        drafts: dict[ModelDrafter, list[int]] = {}
        for drafter, _ in left:
            self._follow(drafter)
        left = self._compute_texts(left, drafts)
        while left := [(drafter, count) for drafter, count in left if len(drafts[drafter]) < count]:
            left = self._run(left, [1] * len(left), drafts)
        return [drafts.get(drafter, []) for drafter, _ in wanted]

    def _follow(self, drafter: ModelDrafter) -> None:
        """Has the drafter's sequence know its text, and no more; the last token is left to compute."""
        if drafter.sequence is None:
            drafter.sequence = self._cache.open(
                drafter.text, namespace=drafter.namespace, max_num_tokens=self._max_model_len
            )
        else:
            num_right = 0
            for draft, token in zip(drafter.drafts, drafter.text[drafter.num_known :], strict=False):
                if draft != token:
                    break
                num_right += 1
            position = min(drafter.num_known + num_right, len(drafter.text) - 1)
            self._cache.rewind(drafter.sequence, position)
            drafter.sequence.append(drafter.text[position:])
        self._open.pop(drafter, None)
        self._open[drafter] = None
        drafter.num_known, drafter.drafts = len(drafter.text), []

    def _compute_texts(
        self, wanted: list[tuple[ModelDrafter, int]], drafts: dict[ModelDrafter, list[int]]
    ) -> list[tuple[ModelDrafter, int]]:
        """Computes what is missing of the texts, a chunk together, and the first draft of those that are complete."""
        room, counts, chosen = self._chunk, [], []
        for drafter, count in wanted:
            assert drafter.sequence is not None
            missing = drafter.num_known - drafter.sequence.num_computed_tokens
            if room:
                counts.append(min(missing, room))
                chosen.append((drafter, count))
                room -= counts[-1]
        return self._run(chosen, counts, drafts) if chosen else []

    def _run(
        self,
        chosen: list[tuple[ModelDrafter, int]],
        counts: list[int],
        drafts: dict[ModelDrafter, list[int]],
    ) -> list[tuple[ModelDrafter, int]]:
        """A step: each drafter's next tokens, so many; those whose tokens are all computed then have one more draft.
        Returns these."""
        began = time.perf_counter()
        sequences = [drafter.sequence for drafter, _ in chosen if drafter.sequence is not None]
        plan = self._cache.reserve(sequences, counts)
        while plan is None:
            if not self._make_room([drafter for drafter, _ in chosen]):
                chosen, counts, sequences = chosen[:-1], counts[:-1], sequences[:-1]
                if not chosen:
                    return []
            plan = self._cache.reserve(sequences, counts)
        starts = [sequence.num_computed_tokens for sequence in sequences]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        rows = np.cumsum(counts) - 1
        is_whole = [end == sequence.num_tokens for end, sequence in zip(ends, sequences, strict=True)]
        try:
            logits: torch.Tensor = self._runner.run(
                Batch(
                    sequences=[],
                    sequence_ids=np.array([sequence.id for sequence in sequences], np.int64),
                    num_new_tokens=np.array(counts, np.int64),
                    input_ids=np.concatenate(
                        [
                            np.array(
                                (drafter.text[: drafter.num_known] + drafter.drafts)[start:end], np.int64
                            )
                            for (drafter, _), start, end in zip(chosen, starts, ends, strict=True)
                        ]
                    ),
                    positions=np.concatenate(
                        [
                            np.arange(start, end, dtype=np.int64)
                            for start, end in zip(starts, ends, strict=True)
                        ]
                    ),
                    logit_rows=rows[is_whole],
                    sampled=[],
                    draw_rows=_NONE,
                    plan=plan,
                    closed_ids=np.array(self._closed_ids, np.int64),
                )
            )
        except StepRefusedError:
            return []
        self._closed_ids.clear()
        whole = [one for one, is_complete in zip(chosen, is_whole, strict=True) if is_complete]
        logits = logits[:, : self._num_ids]
        likeliest = logits.argmax(dim=-1).tolist() if whole else []
        for sequence, end in zip(sequences, ends, strict=True):
            self._cache.commit(sequence, end)
        for row, (drafter, _) in enumerate(whole):
            assert drafter.sequence is not None
            token = drafter.next_draft(logits[row], likeliest[row])
            self._cache.withdraw(drafter.sequence)
            drafter.sequence.append([token])
            drafter.drafts.append(token)
            drafts.setdefault(drafter, []).append(token)
        self._costs.add(sum(counts), time.perf_counter() - began)
        return whole

    def _make_room(self, kept: list[ModelDrafter]) -> bool:
        """Closes the sequence unused for longest, of a drafter that is not kept; False: there is none."""
        for drafter in self._open:
            if drafter not in kept:
                self.release(drafter)
                return True
        return False

    def release(self, drafter: ModelDrafter) -> None:
        """Closes a drafter's sequence; a later proposal opens another one."""
        if drafter.sequence is not None:
            self._cache.close(drafter.sequence)
            self._closed_ids.append(drafter.sequence.id)
            drafter.sequence = None
            drafter.num_known, drafter.drafts = 0, []
            del self._open[drafter]

    def check(self) -> None:
        """The cache's invariants, and that only open drafters hold blocks. *raises:* InvariantError."""
        self._cache.check()

    @property
    def kv_bytes(self) -> int:
        """Bytes of `kv_memory` for its keys and values."""
        return self._cache.num_blocks * self._cache.block_bytes

    @property
    def num_sequences(self) -> int:
        """Texts that hold blocks now."""
        return len(self._open)


def open_draft_model(
    config: EngineConfig, target: OpenModel, resources: ExitStack
) -> tuple[DraftModel, EngineConfig]:
    """The draft model of `speculation="model:PATH"`, and the config of the engine with the memory that is left for it.

    `resources` closes the draft model.

    *raises:* ArgumentError: another tokenizer. As `open_model`, `check_rewinds` and `divide_memory`.
    """
    from quire.engine.runner import Runner

    ours = draft_config(config)
    assert ours is not None
    with errors_of_draft():
        draft = open_model(ours, resources)
    check_rewinds(ours, draft.spec, draft.prepared.by_own_forward)
    _check_tokens(draft, target, f"{ours.model} - in `speculation`")
    divided = divide_memory(
        config,
        kv_layout(storage_of(config, target.spec), config, target.spec, target.max_model_len),
        target.max_model_len,
        ours,
        draft.spec,
        draft.max_model_len,
        device_of(config).free_bytes(),
    )
    opened = open_storage(divided.draft_config, draft.spec, draft.max_model_len)
    resources.callback(opened.storage.close)
    runner = Runner(draft.prepared, opened.storage, num_threads=config.num_threads)
    _log.info(
        "drafts of %s: KV cache of %s within the memory, %d blocks",
        draft.loaded.name,
        format_size(divided.draft_fit.num_bytes),
        opened.cache.num_blocks,
    )
    model = DraftModel(
        runner,
        opened.cache,
        vocab_size=draft.loaded.vocab_size,
        num_ids=target.loaded.vocab_size,
        max_model_len=min(draft.max_model_len, opened.cache.max_sequence_tokens()),
        chunk=config.max_batch_tokens,
    )
    return model, divided.config


def _check_tokens(draft: OpenModel, target: OpenModel, where: str) -> None:
    """*raises:* ArgumentError: the same id is another token in the draft model."""
    theirs, ours = target.loaded.tokenizer, draft.loaded.tokenizer
    if theirs is None or ours is None:
        if target.loaded.vocab_size != draft.loaded.vocab_size:
            raise ArgumentError(
                f"expected a draft model with {target.loaded.vocab_size} token ids, as the model without a tokenizer "
                f"has, got {draft.loaded.vocab_size}: {where}"
            )
        return
    known, drafted = theirs.get_vocab(), ours.get_vocab()
    if known != drafted:
        token = next(iter(sorted(known.items() ^ drafted.items(), key=lambda item: item[1])))[0]
        raise ArgumentError(
            f"expected a draft model with the model's tokenizer, got another one: token {token!r} is "
            f"{known.get(token)} in the model's and {drafted.get(token)} in the draft model's: {where}"
        )
