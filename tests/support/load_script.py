"""A program of scripts/ as a module."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "scripts"


@functools.cache
def load_script(name: str) -> Any:
    """scripts/`name`, imported and not run."""
    loader = SourceFileLoader(f"scripts_{name.replace('-', '_')}", str(SCRIPTS / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module
