"""Names that a release has changed: the old one works until the next, and says what the new one is."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["moved", "renamed", "with_new_names"]

Called = TypeVar("Called", bound=Callable[..., Any])


def with_new_names(
    options: Mapping[str, Any], names: Mapping[str, str], stacklevel: int = 3
) -> dict[str, Any]:
    """names: new ones by old ones. *raises:* TypeError where both are given."""
    found = dict(options)
    for old, new in names.items():
        if old in found:
            if new in found:
                raise TypeError(f"expected {new} alone, got {old} too, which is its old name")
            warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=stacklevel)
            found[new] = found.pop(old)
    return found


def renamed(**names: str) -> Callable[[Called], Called]:
    """Has a function take keywords by their old names too: `@renamed(old="new")`."""

    def decorate(function: Called) -> Called:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **with_new_names(options, names))

        return call  # type: ignore[return-value]

    return decorate


def moved(old: str, new: str) -> Any:
    """A member `old` that is elsewhere now: `pin = moved("pin", "pins.add")`."""

    def get(owner: Any) -> Any:
        warnings.warn(f"{type(owner).__name__}.{old} is .{new} now", DeprecationWarning, stacklevel=2)
        return operator.attrgetter(new)(owner)

    return property(get, doc=f"The old name of `{new}`.")
