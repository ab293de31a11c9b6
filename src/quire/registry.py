"""Maps names to values of one kind: built-in values, and registered ones.

A dict, changed by `register` and `unregister`: a name has one value, registering an equal value again is accepted,
built-in values stay.

Cost: a look-up in a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, TypeVar

from quire.errors import ArgumentError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(dict[str, T]):
    """kind: noun phrase for a value, and option: the option that takes its name, both for errors. built_in: permanent
    values."""

    def __init__(self, kind: str, option: str, built_in: Mapping[str, T]) -> None:
        super().__init__(built_in)
        self._kind, self._option = kind, option
        self._built_in = frozenset(built_in)

    def register(self, name: str, value: T) -> None:
        """Give `name` a value; an equal value again changes nothing. *raises:* ArgumentError: the name has another
        value."""
        if self.setdefault(name, value) != value:
            raise ArgumentError(
                f"expected a new name for {self._kind}, got {name!r}, which is taken; take another "
                f"than {sorted(self)}"
            )

    def unregister(self, name: str) -> None:
        """Undo `register`; users of the value are unaffected. *raises:* ArgumentError: the name is built in or
        unknown."""
        if name in self._built_in or name not in self:
            raise ArgumentError(
                f"expected {self._kind} that was registered, one of {sorted(self.keys() - self._built_in)}, "
                f"got {name!r}"
            )
        del self[name]

    def __missing__(self, name: str) -> NoReturn:
        raise ArgumentError(
            f"expected {self._kind}, one of {sorted(self)}, got {name!r} - in `{self._option}`; take one of these, or "
            "register yours first"
        )
