"""Switches off transformers' own progress bars ("Loading weights") during a load, which `load_progress` reports.

transformers has one hook for the bars of the process. It is installed while a load runs, replaces only the bars of
loads in this context (`contextvars`), and hands others to the hook that was there before; so bars of other threads and
of the time after a load are unchanged.

Cost: two assignments for each load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.utils import logging

__all__ = ["without_progress_bars"]

_is_quiet: ContextVar[bool] = ContextVar("quire quiet load", default=False)
_lock = threading.Lock()
_num_loads = 0
_previous_hook: Any = None


def _hook(factory: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if _is_quiet.get():
        return factory(*arguments, **{**options, "disable": True})
    previous = _previous_hook
    return factory(*arguments, **options) if previous is None else previous(factory, arguments, options)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Shows no bar of transformers for loads within the block, in this context."""
    global _num_loads, _previous_hook
    with _lock:
        _num_loads += 1
        if _num_loads == 1:
            _previous_hook = logging.set_tqdm_hook(_hook)
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)
        with _lock:
            _num_loads -= 1
            if _num_loads == 0:
                installed = logging.set_tqdm_hook(_previous_hook)
                if installed is not _hook:  # another hook was installed meanwhile: it stays
                    logging.set_tqdm_hook(installed)
                _previous_hook = None
