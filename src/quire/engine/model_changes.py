"""A model that somebody changes while an engine has it open: seen when the engine gets to work, and followed.

Looked at is the stamp of the proof (`quire.model.prove.model_record`), in the engine's thread, before the first
request of an
idle engine is taken: never between two steps, so that one answer is one model's. Changed: the model is prepared and
proved again as it is, cached content is forgotten, and tiers go on under another fingerprint, where what they hold of
the model as it was is found again if it ever is that again. What cannot be followed (another dtype, vocabulary or
device, training mode, autocast) is an error for each request until it is changed back; the model is then as it would be
without Quire.

Cost: a look, some 0.2 ms; following, what opening the model costs once it is loaded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from quire.engine.engine import Engine
from quire.errors import ArgumentError, QuireError
from quire.model.fingerprint import engine_fingerprint, stored_fingerprint
from quire.model.load import LoadedModel, load
from quire.model.prepare import PreparedModel
from quire.model.prove.model_record import ModelRecord
from quire.offload.open_tiers import OpenTiers

if TYPE_CHECKING:
    from quire.engine.open_storage import OpenStorage

__all__ = ["ModelChanges"]

_log = logging.getLogger("quire")


class ModelChanges:
    """Of the model that `prepared` runs for `engine`. tiers: None where there are none. backend: as in `LLM`."""

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
        self._stamp = prepared.model_record
        self._hooks = prepared.model_record.look().hooks
        self._failure: QuireError | None = None  # why the model as it is cannot be run

    def refuse_autocast(self) -> None:
        """In the caller's thread, whose state it is. *raises:* ArgumentError inside of `torch.autocast`."""
        if torch.is_autocast_enabled("cpu"):
            raise ArgumentError(
                f"expected no torch.autocast around an LLM, which computes in its model's {self._opened.spec.dtype}; "
                "leave that block, or open the LLM with the dtype you want"
            )

    def follow(self) -> None:
        """Have the engine run the model as it is now. *raises:* ArgumentError, UnsupportedModelError: it cannot."""
        look = self._stamp.look()
        if look.changed is None and look.hooks == self._hooks:
            if self._failure is not None:
                raise self._failure
            if look.training:
                raise ArgumentError(
                    "expected the model of an open LLM in eval mode, got it in training mode, in which it drops values "
                    "at random; call model.eval()"
                )
            return
        reason = look.changed or "its hooks have changed"
        _log.info("%s: the model was changed (%s); it is prepared again", self._opened.name, reason)
        self._forget()
        self._prepared.restore()
        try:
            model, before = self._opened.model, self._opened
            # The name of the format stays; another dtype is refused below.
            dtype = before.spec.dtype if model.dtype == before.dtype else "auto"
            loaded = load((model, before.tokenizer), dtype=dtype)
            self._check(loaded, reason)
            if self._tiers is not None:
                found = engine_fingerprint(loaded, self._backend)
                offsets = self._prepared.key_offsets
                self._tiers.renew(stored_fingerprint(found, self._storage.spec, offsets))
            self._prepared.prepare_again(loaded, self._storage)
        except QuireError as error:
            self._failure = error
            self._stamp = ModelRecord(self._opened.model)
            self._hooks = self._stamp.look().hooks
            raise
        self._failure, self._stamp = None, self._prepared.model_record
        self._hooks = self._stamp.look().hooks

    def _check(self, loaded: LoadedModel, reason: str) -> None:
        """*raises:* ArgumentError: memory and limits that were made for the model do not fit it any more."""
        before = self._opened
        for what, then, now in (
            ("weights of", before.spec.dtype, loaded.spec.dtype),
            ("a vocabulary of", before.vocab_size, loaded.vocab_size),
            ("layers that keep", before.spec.layers, loaded.spec.layers),
        ):
            if then != now:
                got: tuple[Any, Any] = (then, now)
                if what == "layers that keep":
                    got = "the keys and values they kept", "others"
                raise ArgumentError(
                    f"expected the model of an open LLM with {what} {got[0]}, as it was opened, got {got[1]} "
                    f"({reason}); change it back, or close this LLM and open another"
                )

    def _forget(self) -> None:
        """Let go of all content: it is of the model as it was."""
        pins = list(self._cache.pins)
        if pins:
            _log.warning(
                "%s: %d pins are gone, as the model they were made of was changed; pin again",
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
