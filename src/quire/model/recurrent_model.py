"""A model with states only, run by its own recurrent forward: one sequence and one token at a time (RWKV, xLSTM).

For models whose forward takes the states of all layers in a special form, and whose mixers `quire.model.state` does not
know. No module of such a model is replaced. A sequence's states lie in its slot, in float32. A step converts them to
the model's form, calls the forward once per token, and writes them back. After a token with a checkpoint it writes them
to the checkpoint too. So bits depend neither on how a prompt is cut nor on other sequences. The proof is the probe of
`prove`. Not for models with K and V in addition to states.

Cost: a forward of the model for each token, prompts too; a copy of the states for each sequence and step.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quire.errors import UnsupportedModelError
from quire.memory.storage import Storage
from quire.model.cache_keyword import cache_keyword
from quire.model.paged_cache import PagedCache
from quire.model.prepare import PreparedModel
from quire.model.prove.generated_tokens import check_generate
from quire.model.prove.model_probe import Probe, run_probe_steps
from quire.saved_folder import SavedFolder
from quire.step import ForwardStep
from quire.weights.load import LoadedModel

__all__ = ["RecurrentModel", "has_recurrent_forward"]

_Layers: TypeAlias = Sequence[Mapping[str, torch.Tensor]]  # of one sequence: each layer's states by name
_Arguments: TypeAlias = dict[str, Any]  # the forward's arguments with the states


class _StateForm(ABC):
    """The form in which a model's forward takes and returns its states."""

    names: tuple[str, ...]  # of a layer's states, as in `quire.spec.state_spec`

    def __init__(self, model: Any) -> None:
        self.model = model

    @abstractmethod
    def arguments(self, layers: _Layers) -> _Arguments:
        """Arguments of a forward that continues from these states, which it may change."""

    @abstractmethod
    def next_arguments(self, output: Any) -> _Arguments:
        """Arguments of the forward after the one that returned `output`."""

    @abstractmethod
    def layers(self, arguments: _Arguments) -> _Layers:
        """The states in a forward's arguments."""


class _StateList(_StateForm):
    """RWKV's form: a tensor [1, channels, layers] for each of five kinds of state."""

    names = ("feed_forward", "attention", "numerator", "denominator", "maximum")

    def arguments(self, layers: _Layers) -> _Arguments:
        stacked = [torch.stack([layer[name] for layer in layers], dim=-1)[None] for name in self.names]
        states = [state.to(self.model.dtype) if i < 2 else state for i, state in enumerate(stacked)]
        return {"state": states}

    def next_arguments(self, output: Any) -> _Arguments:
        return {"state": output.state}

    def layers(self, arguments: _Arguments) -> _Layers:
        states = arguments["state"]
        return [
            {name: state[0, :, layer] for name, state in zip(self.names, states, strict=True)}
            for layer in range(states[0].shape[-1])
        ]


class _CellStates(_StateForm):
    """xLSTM's form: an object with a tuple of three states for each layer."""

    names = ("cell", "normalizer", "maximum")

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._keyword = cache_keyword(model.forward) or "cache"

    def arguments(self, layers: _Layers) -> _Arguments:
        cache = vars(sys.modules[type(self.model).__module__])["xLSTMCache"](
            self.model.config, 1, dtype=self.model.dtype, device=self.model.device
        )
        for number, layer in enumerate(layers):
            for name, state in zip(self.names, cache.rnn_state[number], strict=True):
                state[0].copy_(layer[name])
        return {self._keyword: cache}

    def next_arguments(self, output: Any) -> _Arguments:
        return {self._keyword: getattr(output, self._keyword)}

    def layers(self, arguments: _Arguments) -> _Layers:
        (cache,) = arguments.values()
        return [
            {name: state[0] for name, state in zip(self.names, cache.rnn_state[layer], strict=True)}
            for layer in sorted(cache.rnn_state)
        ]


_FORMS: tuple[type[_StateForm], ...] = (_StateList, _CellStates)


def _form_of(loaded: LoadedModel) -> type[_StateForm] | None:
    names = {tuple(field.name for field in state.fields) for state in loaded.spec.states}
    return next((form for form in _FORMS if names == {form.names}), None)


def has_recurrent_forward(loaded: LoadedModel) -> bool:
    """Whether `RecurrentModel` can run this model: it has states only, and its forward takes them in a known form."""
    return not loaded.spec.stores_kv and _form_of(loaded) is not None


class RecurrentModel(PreparedModel):
    """The model of `loaded`, ready for `forward`, which calls the model's own once a token. Made as `PreparedModel`.

    *raises:* UnsupportedModelError: its logits from stored states differ from those for the whole text.
    """

    by_own_forward = True

    @property
    def by_token(self) -> bool:
        return True

    def _read_forward(self, loaded: LoadedModel, needs: frozenset[str]) -> tuple[frozenset[str], str]:
        form = _form_of(loaded)
        if form is None:
            raise UnsupportedModelError(
                f"model type {loaded.model_type}: expected states in a form that Quire knows, got {loaded.spec.states}"
            )
        self._form = form(loaded.model)
        return frozenset(), ""

    def cache_over(self, storage: Storage) -> PagedCache:
        self.check_storage(storage)
        return PagedCache(self.spec, storage, self.device, self.loaded.model_type, storage.states)

    def model_logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, *, eager: bool = False
    ) -> torch.Tensor:
        """As `PreparedModel.model_logits`: all tokens in one forward, over states that the model makes itself."""
        model: Any = self._model
        with self.eager_attention() if eager else torch.inference_mode():
            return model(input_ids=input_ids.reshape(-1, positions.numel()), use_cache=True).logits

    def _forward(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor:
        cache.begin(step)
        try:
            with torch.inference_mode():
                return self._by_token(step, cache)
        finally:
            cache.end()

    def _by_token(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor:
        """[R, vocab_size]: the logits of `step.logits_rows`, token by token."""
        assert step.states is not None  # of a model with states
        model: Any = self._model
        logits_rows, logits = step.logits_rows.tolist(), dict[int, torch.Tensor]()
        begins_text = step.states.begins_text.tolist()
        for slot, rows in step.states.sequences():
            at_start = begins_text[rows.start]
            arguments = {} if at_start else self._form.arguments([
                {name: states[slot] for name, states in cache.state_of(state.layer).items()}
                for state in self.spec.states
            ])  # fmt: skip
            for row in rows:
                output = model(input_ids=step.input_ids[None, row : row + 1], use_cache=True, **arguments)
                arguments = self._form.next_arguments(output)
                if row in logits_rows:
                    logits[row] = output.logits[0, -1].clone()
                for target in step.states.checkpoints_after(row):
                    self._write_states(cache, target, arguments)
            self._write_states(cache, slot, arguments)
        if not logits_rows:
            return torch.empty(0, self.vocab_size)
        return torch.stack([logits[row] for row in logits_rows])

    def _write_states(self, cache: PagedCache, slot: int, arguments: _Arguments) -> None:
        for state, values in zip(self.spec.states, self._form.layers(arguments), strict=True):
            for name, states in cache.state_of(state.layer).items():
                states[slot].copy_(values[name])

    def _change(self, model: PreTrainedModel, packed_weights: SavedFolder | None) -> None:
        """Runs one token: in its first forward RWKV halves weights of deep layers. No other change."""
        if not self.device.is_host:
            raise UnsupportedModelError(
                f"model type {self.loaded.model_type}: its own forward runs in host memory only"
            )
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)

    def _prove(self, model: PreTrainedModel) -> None:
        probe = Probe(self, needs_float64=False)  # the model's code may be fixed to float32
        probe.require(run_probe_steps(self))
        check_generate(self.loaded, probe)

    def _threads(self) -> AbstractContextManager[None]:
        return nullcontext()  # torch computes, with the caller's threads
