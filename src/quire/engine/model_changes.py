"""`ModelChanges`: detects a model that was changed while an engine has it open, and prepares it again.

Before an idle engine takes a request it compares the model with its recorded state (`quire.model.prove.model_record`);
never between two steps, so that one answer is from one model. A changed model is prepared and proved again, cached
content is dropped, and tiers continue under another fingerprint; their content of the old model is found again if the
model is changed back. Some changes cannot be followed (another dtype, vocabulary or device, training mode, autocast):
each request is an error until they are undone; the model is then as it would be without Quire.

Cost: about 0.2 ms a comparison; a followed change costs as much as opening the loaded model.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from quire.engine.engine import Engine
from quire.errors import ArgumentError, QuireError
from quire.model.fingerprint import engine_fingerprint, stored_fingerprint
from quire.model.prepare import PreparedModel
from quire.model.prove.model_record import ModelRecord
from quire.offload.open_tiers import OpenTiers
from quire.weights.load import LoadedModel, load

if TYPE_CHECKING:
    from quire.engine.open_storage import OpenStorage

__all__ = ["ModelChanges"]

_log = logging.getLogger("quire")


class ModelChanges:
    """Watches the model that `prepared` runs for `engine`. tiers: None if there are none. backend: as in `LLM`."""

    def __init__(
        self,
        prepared: PreparedModel,
        engine: Engine,
        opened: OpenStorage,
        tiers: OpenTiers | None,
        backend: str | None,
    ) -> None:
        self._prepared, self._engine, self._tiers = prepared, engine, tiers
        self._storage, self._cache = opened.storage, opened.cache
        self._backend = backend
        self._opened: LoadedModel = prepared.loaded
        self._model_record = prepared.model_record
        self._hooks = prepared.model_record.compare().hooks
        self._failure: QuireError | None = None  # why the changed model cannot be run

    def refuse_autocast(self) -> None:
        """*raises:* ArgumentError: the calling thread is inside `torch.autocast`."""
        if torch.is_autocast_enabled(self._prepared.device.torch_device.type):
            raise ArgumentError(
                f"expected no torch.autocast around an LLM, which computes in its model's {self._opened.spec.dtype}; "
                "leave that block, or open the LLM with the dtype you want"
            )

    def follow(self) -> None:
        """Makes the engine run the model in its present state. *raises:* ArgumentError, UnsupportedModelError."""
        change = self._model_record.compare()
        if change.changed is None and change.hooks == self._hooks:
            if self._failure is not None:
                raise self._failure
            if change.training:
                raise ArgumentError(
                    "expected the model of an open LLM in eval mode, got it in training mode, in which it drops values "
                    "at random; call model.eval()"
                )
            return
        reason = change.changed or "its hooks have changed"
        _log.info("%s: the model was changed (%s); it is prepared again", self._opened.name, reason)
        self._drop_content()
        self._prepared.restore()
        try:
            model, before = self._opened.model, self._opened
            # Keeps the name of the format; `_check` refuses another dtype.
            dtype = before.spec.dtype if model.dtype == before.dtype else "auto"
            loaded = load((model, before.tokenizer), dtype=dtype)
            self._check(loaded, reason)
            if self._tiers is not None:
                fingerprint = engine_fingerprint(loaded, self._backend)
                offsets = self._prepared.key_offsets
                self._tiers.set_fingerprint(stored_fingerprint(fingerprint, self._storage.spec, offsets))
            self._prepared.prepare_again(loaded, self._storage)
        except QuireError as error:
            self._failure = error
            self._model_record = ModelRecord(self._opened.model)
            self._hooks = self._model_record.compare().hooks
            raise
        self._failure, self._model_record = None, self._prepared.model_record
        self._hooks = self._model_record.compare().hooks

    def _check(self, loaded: LoadedModel, reason: str) -> None:
        """*raises:* ArgumentError: the memory and limits made for the old model do not fit the new one."""
        before = self._opened
        for subject, old, new in (
            ("weights of", before.spec.dtype, loaded.spec.dtype),
            ("a vocabulary of", before.vocab_size, loaded.vocab_size),
            ("layers that keep", before.spec.layers, loaded.spec.layers),
        ):
            if old != new:
                got: tuple[Any, Any] = (old, new)
                if subject == "layers that keep":
                    got = "the keys and values they kept", "others"
                raise ArgumentError(
                    f"expected the model of an open LLM with {subject} {got[0]}, as it was opened, got {got[1]} "
                    f"({reason}); change it back, or close this LLM and open another"
                )

    def _drop_content(self) -> None:
        """Drops all content, which is the old model's."""
        pins = list(self._cache.pins)
        if pins:
            _log.warning(
                "%s: %d pins are removed, because the model was changed; pin again",
                self._opened.name,
                len(pins),
            )
        for pin in pins:
            self._engine.tenants.withdraw(pin)
            self._cache.pins.remove(pin)
        self._engine.collect()
        for namespace in self._cache.namespaces():
            self._cache.drop([], namespace=namespace)
        self._engine.collect()
