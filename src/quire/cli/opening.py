"""Opens an `LLM` for a command: checks a Hub model first, and shows the load on a terminal.

Not here: the options of a config (`quire.config`), the load itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from quire import hub
from quire.config import EngineConfig
from quire.load_progress import progress_to

if TYPE_CHECKING:
    from quire.engine.llm import LLM

__all__ = ["ask_hub", "open_llm"]


def ask_hub(config: EngineConfig) -> None:
    """*raises:* LoadError: the Hub model cannot be used. Runs before torch is imported, which takes seconds."""
    if hub.is_id(config.model):
        hub.offline_folder(config.model, config.revision)


def open_llm(config: EngineConfig) -> LLM:
    """*raises:* as `LLM`."""
    ask_hub(config)
    with LoadBar() as bar, progress_to(bar):
        from quire.engine.llm import LLM  # imported late: --help and bad options do not wait for torch

        return LLM(config=config)


class LoadBar:
    """A `LoadObserver` that draws phase and bytes on stderr during its `with` block and then removes the bar. Draws
    nothing where stderr is not a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> LoadBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin_phase(self, phase: str, num_bytes: int = 0) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=phase, **({"total": num_bytes} if num_bytes else {}))

    def add_read(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, num_bytes)
