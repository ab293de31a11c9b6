"""The names of `import quire`, and the cost of the import."""

from __future__ import annotations

import subprocess
import sys

import quire


def test_public_names_are_the_documented_ones() -> None:
    assert sorted(quire.__all__) == list(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name) is not None


def test_import_quire_brings_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, quire; quire.Cache, quire.KVSpec; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
