"""A model that computes attention itself, run by its own forward: one sequence at a time, on Quire's memory.

For models that `PreparedModel` refuses since their layers do not call transformers' attention interface, count
positions themselves, or alter K and V after they are stored. No module of such a model is replaced: a step is one
forward for each of its sequences, with a cache (`sequence_cache`) that returns K and V of all its tokens. Not exact to
the bit: torch's products decide the bits, and they depend on how a prompt is cut into steps. In float32 the greedy
tokens are `generate`'s; the proof is the probe of `prove`, on memory that is gathered and on memory that is not. The
only requirement is the model's forward: a model that is not a decoder (attends to later tokens) is refused.

A model whose layers select tokens by an indexer (DSA) runs token by token, prompts too: the selection depends on the
last bits of scores, and forwards of one token give the same bits however a prompt is cut.

Cost: a forward of the model for each sequence and step, or for each token. Preparation is the probe alone.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quire.errors import UnsupportedModelError
from quire.memory.storage import Storage
from quire.model import rope
from quire.model.cache_keyword import cache_keyword
from quire.model.paged_cache import PagedCache
from quire.model.prepare import PreparedModel
from quire.model.prove.generated_tokens import check_generate
from quire.model.prove.indexer import limited_indexers
from quire.model.prove.model_probe import Probe, run_probe_steps
from quire.model.recurrent_model import RecurrentModel, has_recurrent_forward
from quire.model.sequence_cache import SequenceCache
from quire.saved_folder import SavedFolder
from quire.step import ForwardStep
from quire.weights.load import LoadedModel

__all__ = ["SequentialModel", "prepare"]

_log = logging.getLogger("quire")

HOW_IT_RUNS = (
    "one sequence at a time: slower, tokens exact in float32, bits equal only for a prompt cut alike"
)
HOW_IT_RUNS_BY_TOKEN = (
    "one sequence and one token at a time, prompts too: much slower, tokens exact in float32, bits equal however a "
    "prompt is cut"
)
# Block sizes of the probe's memory: for sequences of several blocks, and of a single block.
_GATHERED, _WHOLE = 4, 16


class SequentialModel(PreparedModel):
    """The model of `loaded`, ready for `forward`, which calls the model's own once a sequence. Made as `PreparedModel`.

    *raises:* UnsupportedModelError: its forward takes no cache, or its logits with a cache differ from those without.
    """

    by_own_forward = True
    needs = frozenset({"input_ids"})
    _selects = False  # whether indexers select few tokens, for a proof

    @property
    def by_token(self) -> bool:
        """Whether a forward has one token: if an indexer selects tokens, so that the rounding of a longer forward does
        not decide. Then bits do not depend on how a prompt is cut."""
        return self.spec.has_indexer

    def cache_over(self, storage: Storage) -> SequenceCache:
        self.check_storage(storage)
        return SequenceCache(self.spec, storage, self.device, self.loaded.model_type)

    def model_logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, *, eager: bool = False
    ) -> torch.Tensor:
        """As `PreparedModel.model_logits`, without a cache: all tokens in one forward. During the proof of indexers,
        token by token with that cache: ties between scores are broken alike only in rows of one length."""
        rows = input_ids.reshape(-1, positions.numel())
        with self.eager_attention() if eager else torch.inference_mode():
            if not self._selects:
                return self._logits(self._arguments(rows, 0, use_cache=False))
            logits: list[torch.Tensor] = []
            for past in range(rows.shape[1]):
                arguments = self._arguments(rows[:, past : past + 1], past, use_cache=True)
                logits.append(self._logits({**arguments, self._cache_keyword: cache}))
            return torch.cat(logits, dim=1)

    def _forward(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor:
        assert isinstance(cache, SequenceCache)
        cache.begin(step)
        try:
            with torch.inference_mode():
                return self._by_sequence(step, cache)
        finally:
            cache.end()

    def _by_sequence(self, step: ForwardStep, cache: SequenceCache) -> torch.Tensor:
        """[R, vocab_size]: the logits of `step.logits_rows`, sequence by sequence."""
        step_logits: torch.Tensor | None = None
        for first, stop, num_past in cache.forwards(by_token=self.by_token):
            is_in_forward = (step.logits_rows >= first) & (step.logits_rows < stop)
            rows = step.logits_rows[is_in_forward] - first
            arguments = self._arguments(step.input_ids[None, first:stop], num_past, use_cache=True)
            arguments[self._cache_keyword] = cache
            if selects_rows := "logits_to_keep" in self._parameters:
                arguments["logits_to_keep"] = rows
            logits = self._logits(arguments)[0]
            self._check_stored(cache)
            if step_logits is None:
                step_logits = logits.new_empty(step.logits_rows.numel(), logits.shape[-1])
            step_logits[is_in_forward] = logits if selects_rows else logits[rows]
        assert step_logits is not None  # a step has a sequence
        return step_logits

    def _logits(self, arguments: dict[str, Any]) -> torch.Tensor:
        model: Any = self._model
        return model(**arguments).logits

    def _arguments(self, input_ids: torch.Tensor, num_past: int, *, use_cache: bool) -> dict[str, Any]:
        """The forward's arguments in `generate` for ids [n, T] after `num_past` tokens, without the cache."""
        num_rows, num_tokens = input_ids.shape
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": torch.arange(num_past, num_past + num_tokens)[None].expand(num_rows, -1),
            "attention_mask": torch.ones(num_rows, num_past + num_tokens, dtype=torch.int64),
            "use_cache": use_cache,
        }
        return {name: value for name, value in arguments.items() if name in self._parameters}

    def _check_stored(self, cache: SequenceCache) -> None:
        expected = len(self.spec.layers)
        if cache.num_attended != expected:
            raise UnsupportedModelError(
                f"model type {self.loaded.model_type}: expected K and V of {expected} layers from its own forward, got "
                f"those of {cache.num_attended}"
            )

    def _change(self, model: PreTrainedModel, packed_weights: SavedFolder | None) -> None:
        """Freezes rotary embeddings that switch with the length, since they would change stored K. No other change."""
        self._undo.append(rope.freeze(model, self.max_model_len))

    def _prove(self, model: PreTrainedModel) -> None:
        self._check_layers()
        check_generate(self.loaded, self._prove_logits())
        if self.spec.has_indexer and self.loaded.dtype is torch.float32:
            # In 16 bits rounding decides between scores that are nearly equal, and the proof would be void.
            with limited_indexers(model):
                self._selects = True
                try:
                    self._prove_logits()
                finally:
                    self._selects = False

    def _prove_logits(self) -> Probe:
        probe = Probe(self, needs_float64=False)  # the model's code may be fixed to float32
        for block_size in (_GATHERED, _WHOLE):
            probe.require(run_probe_steps(self, block_size=block_size))
        return probe

    def _check_layers(self) -> None:
        """*raises:* UnsupportedModelError: the model needs more than K and V of all tokens of each layer."""
        reason = None
        if not self.device.is_host:
            reason = "runs in host memory only"
        elif any(layer.span.kind == "chunked" for layer in self.spec.layers):
            reason = "gets K and V of all tokens or of a window, and its config has layers that see chunks"
        elif any(layer.shares_kv_with is not None for layer in self.spec.layers):
            reason = "gets each layer's own K and V, and its config has layers that read those of another"
        elif self.spec.states:
            reason = "gets K and V only, and its config has layers with a state"
        if reason is not None:
            raise UnsupportedModelError(f"model type {self.loaded.model_type}: its own forward {reason}")

    def _threads(self) -> AbstractContextManager[None]:
        return nullcontext()  # torch computes, with the caller's threads


def prepare(
    loaded: LoadedModel,
    *,
    backend: str | None = None,
    max_model_len: int | None = None,
    packed_weights: SavedFolder | None = None,
) -> PreparedModel:
    """A `PreparedModel` of `loaded`, or, if that is refused, a `SequentialModel` or `RecurrentModel`.

    *raises:* as `PreparedModel`: the reason of its refusal, and why the model's own forward cannot run either.
    """
    try:
        return PreparedModel(
            loaded, backend=backend, max_model_len=max_model_len, packed_weights=packed_weights
        )
    except UnsupportedModelError as refusal:
        about, later = f"model type {loaded.model_type}: ", "; such models come in a later version"
        reason = str(refusal).removeprefix(about).removesuffix(later)
        kind: type[SequentialModel | RecurrentModel] = SequentialModel
        if has_recurrent_forward(loaded):
            kind = RecurrentModel
        elif cache_keyword(loaded.model.forward) is None:
            raise
        try:
            prepared = kind(loaded, backend=backend, max_model_len=max_model_len)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{about}{reason}; its own forward does not run on Quire's memory either: "
                f"{str(error).removeprefix(about)}"
            ) from refusal
    mode = HOW_IT_RUNS_BY_TOKEN if prepared.by_token else HOW_IT_RUNS
    _log.warning("%s runs by its own forward, %s (%s)", loaded.name, mode, reason)
    return prepared
