"""Who has changed a model: one at a time, because two would change its layers under each other.

A prepared model's layers are packed and fused in place, and undone in the reverse order. A second one on top of the
first does not see what the first has fused, and computes other bits; the first one's undoing takes the packed layers
away from under the second. So the second is refused while the first is there. A holder that was dropped without giving
the model back is undone when the next one comes.

Not a lock: threads that prepare one model at once are not kept apart.

Cost: an attribute of the model; a garbage collection where somebody is about to be refused.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedModel

from quire.errors import ArgumentError

__all__ = ["hold", "let_go", "require_free"]

_NAME = "_quire_hold"  # in the model's __dict__: a dictionary of models would keep them alive through `undo`


class _Hold(NamedTuple):
    # Of which model: a deep copy has the attribute too, which then says nothing.
    model: weakref.ref[PreTrainedModel]
    holder: weakref.ref[object]
    undo: list[Callable[[], None]]


def require_free(model: PreTrainedModel) -> None:
    """Undo what a dropped holder left. *raises:* ArgumentError: somebody holds the model; nothing was changed."""
    held = _hold_of(model)
    if held is None:
        return
    if held.holder() is not None:
        gc.collect()  # one that nobody can reach any more
    if held.holder() is not None:
        raise ArgumentError(
            f"expected a {type(model).__name__} that nobody runs, got one that an open LLM, or accelerate, has changed "
            "in place; close that LLM or call quire.hf.restore(model) first, or load the model once more"
        )
    while held.undo:
        held.undo.pop()()
    del model.__dict__[_NAME]


def hold(model: PreTrainedModel, holder: object, undo: list[Callable[[], None]]) -> None:
    """`holder` changes the model from now on; `undo` is what undoes it, last first, and may grow.

    *raises:* ArgumentError: somebody else holds it.
    """
    require_free(model)
    model.__dict__[_NAME] = _Hold(weakref.ref(model), weakref.ref(holder), undo)


def let_go(model: PreTrainedModel, holder: object) -> None:
    """`holder` has undone everything. Where it does not hold the model, nothing happens."""
    held = _hold_of(model)
    if held is not None and held.holder() is holder:
        del model.__dict__[_NAME]


def _hold_of(model: PreTrainedModel) -> _Hold | None:
    held = model.__dict__.get(_NAME)
    return held if held is not None and held.model() is model else None
