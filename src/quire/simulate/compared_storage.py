"""A storage of a comparison: one of an engine's, or contiguous or growing with another reservation or growth.

An engine has no option for the two: `contiguous` reserves `max`, `growing` grows `spread`.

Cost: that of an `EngineConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from quire.baselines.arena import RESERVATIONS
from quire.baselines.buffers import parse_growth
from quire.config import COMPARED_OPTIONS, OPTION_OF_STORAGE, EngineConfig
from quire.engine import open_storage
from quire.engine.open_storage import OpenStorage
from quire.errors import ArgumentError
from quire.spec import KVSpec

__all__ = ["OPTION_OF_COMPARED", "ComparedStorage"]

# The option that may follow the name of a storage in one string: "growing:together:256".
OPTION_OF_COMPARED = {**OPTION_OF_STORAGE, **COMPARED_OPTIONS}


@dataclass(frozen=True)
class ComparedStorage:
    """config: of the engine, with a storage by its name alone. reservation: of contiguous, max, pow2 or exact. growth:
    of growing, spread or together[:N], all buffers at once by N tokens."""

    config: EngineConfig
    reservation: str = "max"
    growth: str = "spread"

    def __post_init__(self) -> None:
        if self.reservation not in RESERVATIONS:
            raise ArgumentError(
                f"expected {', '.join(RESERVATIONS[:-1])} or {RESERVATIONS[-1]}, got {self.reservation!r} - in "
                "`reservation`"
            )
        parse_growth(self.growth)

    @classmethod
    def parse(cls, text: str, options: Mapping[str, Any]) -> ComparedStorage:
        """The storage of a text, its name or its name with its option: "growing:together:256".

        options: of `EngineConfig`, `reservation` and `growth`; an option of one storage is left out for all others.
        """
        name, colon, value = text.partition(":")
        of_others = {option for storage, option in OPTION_OF_COMPARED.items() if storage != text}
        own = {option: given for option, given in options.items() if option not in of_others}
        if name not in COMPARED_OPTIONS:
            return cls(EngineConfig(storage=text, **own))
        if colon:
            own[COMPARED_OPTIONS[name]] = value
        compared = {option: own.pop(option) for option in COMPARED_OPTIONS.values() if option in own}
        return cls(EngineConfig(storage=name, **own), **compared)

    def open(self, spec: KVSpec, max_model_len: int) -> OpenStorage:
        """The storage and its cache. *raises:* as `quire.engine.open_storage.open_storage`."""
        return OpenStorage(self.config.storage, *self._make(self.config, spec, max_model_len))

    @contextmanager
    def registered(self) -> Iterator[EngineConfig]:
        """The config with which an engine opens this storage within the `with`."""
        if (self.reservation, self.growth) == ("max", "spread"):
            yield self.config
            return
        name = f"compared {self.config.storage}"
        open_storage.register(name, self._make, shares_blocks=False)
        try:
            yield replace(self.config, storage=name)
        finally:
            open_storage.unregister(name)

    def _make(self, config: EngineConfig, spec: KVSpec, max_model_len: int) -> tuple[Any, Any]:
        if self.config.storage == "contiguous":
            return open_storage.open_contiguous(config, spec, max_model_len, reservation=self.reservation)
        if self.config.storage == "growing":
            return open_storage.open_growing(config, spec, max_model_len, growth=self.growth)
        opened = open_storage.open_storage(config, spec, max_model_len)
        return opened.storage, opened.cache
