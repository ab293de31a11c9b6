"""The kernel variants of a build, and its message about missing ones."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from support.variants import needs_emulated

_native = pytest.importorskip("quire._native")

ISAS = _native.supported_isas()
EMULATED = ["emulated_amx_bf16", "emulated_avx512_bf16", "emulated_avx512"]
KNOWN = ["amx_bf16", "avx512_bf16", "avx512", "avx2", "portable", *EMULATED]


def test_variants_are_listed_from_the_richest_on() -> None:
    assert [isa for isa in KNOWN if isa in ISAS] == ISAS
    assert "portable" in ISAS
    assert not _native.isa().startswith("emulated") or "QUIRE_ISA" in os.environ


@needs_emulated
def test_a_build_has_all_emulated_variants_or_none() -> None:
    assert ISAS[-3:] == EMULATED


@pytest.mark.parametrize("isa", [isa for isa in KNOWN if isa not in ISAS])
def test_a_variant_that_is_not_here_is_refused(isa: str) -> None:
    missing = "build-native" if isa in EMULATED else "this processor lacks"
    with pytest.raises(ValueError, match=f"got '{isa}'.*{missing}"):
        _native.PackedWeight(np.zeros((1, 1), np.float32), isa)
    code = "from quire import _native; _native.isa()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "QUIRE_ISA": isa}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"got '{isa}'" in done.stderr
