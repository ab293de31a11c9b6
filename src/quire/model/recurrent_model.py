"""A model of states alone, run by its own recurrent forward: one sequence and one token at a time (RWKV, xLSTM).

For models whose forward takes the states of all layers in a form of its own, and whose mixers `quire.model.state` does
not know. Nothing of such a model is replaced. A sequence's states lie in its slot, in float32. A step reads them into
the model's form, calls the forward once a token, and writes them back. After a token with a checkpoint it writes them
there too. So bits depend neither on how a prompt is cut nor on company. The proof is the probe of `prove`.
Not for models that keep K and V beside states.

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
from quire.model.load import LoadedModel
from quire.model.paged_cache import PagedCache
from quire.model.prepare import PreparedModel
from quire.model.prove.generated_tokens import check_generate
from quire.model.prove.model_probe import Probe, run_probe_steps
from quire.saved_folder import SavedFolder
from quire.step import ForwardStep

__all__ = ["RecurrentModel", "has_own_states"]

_Layers: TypeAlias = Sequence[Mapping[str, torch.Tensor]]  # of one sequence: each layer's states by name
_Given: TypeAlias = dict[str, Any]  # what the forward is given of them


class _Form(ABC):
    """In which form a model's forward takes and gives its states."""

    names: tuple[str, ...]  # of a layer's states, as `quire.spec.state_spec` has them

    def __init__(self, model: Any) -> None:
        self.model = model

    @abstractmethod
    def given(self, layers: _Layers) -> _Given:
        """Arguments of a forward that goes on from these states, which it may change."""

    @abstractmethod
    def after(self, output: Any) -> _Given:
        """Arguments of the forward behind the one that answered `output`."""

    @abstractmethod
    def layers(self, given: _Given) -> _Layers:
        """The states in them."""


class _StateList(_Form):
    """RWKV's: a tensor [1, channels, layers] for each of five kinds of state."""

    names = ("feed_forward", "attention", "numerator", "denominator", "maximum")

    def given(self, layers: _Layers) -> _Given:
        stacked = [torch.stack([layer[name] for layer in layers], dim=-1)[None] for name in self.names]
        return {"state": [one.to(self.model.dtype) if i < 2 else one for i, one in enumerate(stacked)]}

    def after(self, output: Any) -> _Given:
        return {"state": output.state}

    def layers(self, given: _Given) -> _Layers:
        count = given["state"][0].shape[-1]
        return [
            {name: one[0, :, layer] for name, one in zip(self.names, given["state"], strict=True)}
            for layer in range(count)
        ]


class _CellStates(_Form):
    """xLSTM's: an object with a tuple of three states for each layer."""

    names = ("cell", "normalizer", "maximum")

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._keyword = cache_keyword(model.forward) or "cache"

    def given(self, layers: _Layers) -> _Given:
        cache = vars(sys.modules[type(self.model).__module__])["xLSTMCache"](
            self.model.config, 1, dtype=self.model.dtype, device=self.model.device
        )
        for number, layer in enumerate(layers):
            for name, one in zip(self.names, cache.rnn_state[number], strict=True):
                one[0].copy_(layer[name])
        return {self._keyword: cache}

    def after(self, output: Any) -> _Given:
        return {self._keyword: getattr(output, self._keyword)}

    def layers(self, given: _Given) -> _Layers:
        (cache,) = given.values()
        return [
            {name: one[0] for name, one in zip(self.names, cache.rnn_state[layer], strict=True)}
            for layer in sorted(cache.rnn_state)
        ]


_FORMS: tuple[type[_Form], ...] = (_StateList, _CellStates)


def _form_of(loaded: LoadedModel) -> type[_Form] | None:
    kept = {tuple(field.name for field in state.fields) for state in loaded.spec.states}
    return next((form for form in _FORMS if kept == {form.names}), None)


def has_own_states(loaded: LoadedModel) -> bool:
    """Whether `RecurrentModel` is for this model: it keeps states alone, and its forward takes them in a known form."""
    return not loaded.spec.stores_kv and _form_of(loaded) is not None


class RecurrentModel(PreparedModel):
    """The model of `loaded`, ready for `forward`, which calls the model's own once a token. Made as `PreparedModel`.

    *raises:* UnsupportedModelError: it does not answer from states that were kept what it answers to a whole text.
    """

    by_own_forward = True

    @property
    def by_token(self) -> bool:
        return True

    def _read_forward(self, loaded: LoadedModel, needs: frozenset[str]) -> tuple[frozenset[str], str]:
        form = _form_of(loaded)
        if form is None:
            raise UnsupportedModelError(
                f"model type {loaded.model_type}: expected states in a form that quire knows, got {loaded.spec.states}"
            )
        self._form = form(loaded.model)
        return frozenset(), ""

    def cache_over(self, storage: Storage) -> PagedCache:
        self.check_storage(storage)
        return PagedCache(self.spec, storage, self.device, self.loaded.model_type, storage.states)

    def own_logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, *, eager: bool = False
    ) -> torch.Tensor:
        """As `PreparedModel.own_logits`: all tokens in one forward, over states that the model makes itself."""
        model: Any = self._model
        with self.eagerly() if eager else torch.inference_mode():
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
        wanted, found = step.logits_rows.tolist(), dict[int, torch.Tensor]()
        begins_text = step.states.begins_text.tolist()
        for slot, rows in step.states.sequences():
            at_start = begins_text[rows.start]
            given = {} if at_start else self._form.given([
                {name: states[slot] for name, states in cache.state_of(state.layer).items()}
                for state in self.spec.states
            ])  # fmt: skip
            for row in rows:
                output = model(input_ids=step.input_ids[None, row : row + 1], use_cache=True, **given)
                given = self._form.after(output)
                if row in wanted:
                    found[row] = output.logits[0, -1].clone()
                for target in step.states.checkpoints_after(row):
                    self._write(cache, target, given)
            self._write(cache, slot, given)
        return torch.stack([found[row] for row in wanted]) if wanted else torch.empty(0, self.vocab_size)

    def _write(self, cache: PagedCache, slot: int, given: _Given) -> None:
        for state, values in zip(self.spec.states, self._form.layers(given), strict=True):
            for name, states in cache.state_of(state.layer).items():
                states[slot].copy_(values[name])

    def _change(self, model: PreTrainedModel, packed_weights: SavedFolder | None) -> None:
        """Nothing; but RWKV halves weights of deep layers in its first forward, which is to be behind it."""
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)

    def _prove(self, model: PreTrainedModel) -> None:
        if not self.device.is_host:
            raise UnsupportedModelError(
                f"model type {self.loaded.model_type}: its own forward runs on this machine's memory alone"
            )
        probe = Probe(self, needs_float64=False)  # code that is not ours may name float32
        probe.require(run_probe_steps(self))
        check_generate(self.loaded, probe)

    def _threads(self) -> AbstractContextManager[None]:
        return nullcontext()  # torch computes, with the threads of whoever calls
