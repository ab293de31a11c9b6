"""Admits one holder of a model at a time, since two would change its layers under each other.

A prepared model's layers are packed and fused in place, and undone in the reverse order. A second holder does not see
the fused layers of the first, and computes other bits; the first holder's undo takes the packed layers away from under
the second. So the second is refused while the first is alive. If a holder was dropped without restoring the model, the
next holder undoes its changes.

Not a lock of threads: two threads that prepare one model at once are not kept apart.

Cost: an attribute of the model; a garbage collection before a refusal.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedModel

from quire.errors import ArgumentError

__all__ = ["lock_model", "require_unlocked", "unlock_model"]

_NAME = "_quire_hold"  # in the model's __dict__: a dictionary of models would keep them alive through `undo`


class _ModelLock(NamedTuple):
    # The locked model: a deep copy has the attribute too, without effect.
    model: weakref.ref[PreTrainedModel]
    holder: weakref.ref[object]
    undo: list[Callable[[], None]]


def require_unlocked(model: PreTrainedModel) -> None:
    """Undo the changes of a dropped holder. *raises:* ArgumentError: a live holder has the model; nothing was
    changed."""
    lock = _lock_of(model)
    if lock is None:
        return
    if lock.holder() is not None:
        gc.collect()  # the holder may be unreachable
    if lock.holder() is not None:
        raise ArgumentError(
            f"expected a {type(model).__name__} that is not in use, got one that an open LLM, or accelerate, has "
            "changed in place; close that LLM or call quire.hf.restore(model) first, or load the model once more"
        )
    while lock.undo:
        lock.undo.pop()()
    del model.__dict__[_NAME]


def lock_model(model: PreTrainedModel, holder: object, undo: list[Callable[[], None]]) -> None:
    """Make `holder` the model's holder; `undo` undoes its changes, last first, and may grow.

    *raises:* ArgumentError: another holder has it.
    """
    require_unlocked(model)
    model.__dict__[_NAME] = _ModelLock(weakref.ref(model), weakref.ref(holder), undo)


def unlock_model(model: PreTrainedModel, holder: object) -> None:
    """Release the model after `holder` has undone its changes; does nothing if another holder has it."""
    lock = _lock_of(model)
    if lock is not None and lock.holder() is holder:
        del model.__dict__[_NAME]


def _lock_of(model: PreTrainedModel) -> _ModelLock | None:
    lock = model.__dict__.get(_NAME)
    return lock if lock is not None and lock.model() is model else None
