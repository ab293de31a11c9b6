"""What a name stands for: the built-in values of one kind, and those that somebody registered.

A dict, changed by `register` and `unregister`: a name has one value, the same again is accepted, built-in ones stay.

Cost: a look-up in a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, TypeVar

from quire.errors import ArgumentError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(dict[str, T]):
    """what: one of the values, and option: where people give its name, as errors say it. built_in: those that stay."""

    def __init__(self, what: str, option: str, built_in: Mapping[str, T]) -> None:
        super().__init__(built_in)
        self._what, self._option = what, option
        self._built_in = frozenset(built_in)

    def register(self, name: str, value: T) -> None:
        """The same again changes nothing. *raises:* ArgumentError: the name is taken by another."""
        if self.setdefault(name, value) != value:
            raise ArgumentError(
                f"expected a new name for {self._what}, got {name!r}, which is taken; take another "
                f"than {sorted(self)}"
            )

    def unregister(self, name: str) -> None:
        """Undo `register`; who uses the value goes on. *raises:* ArgumentError: built in, or not there."""
        if name in self._built_in or name not in self:
            raise ArgumentError(
                f"expected {self._what} that was registered, one of {sorted(self.keys() - self._built_in)}, "
                f"got {name!r}"
            )
        del self[name]

    def __missing__(self, name: str) -> NoReturn:
        raise ArgumentError(
            f"expected {self._what}, one of {sorted(self)}, got {name!r} - in `{self._option}`; take one of these, or "
            "register yours first"
        )
