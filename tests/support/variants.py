"""The instruction sets of the native kernels in this build."""

from __future__ import annotations

import pytest

from quire.backends import native_module

__all__ = ["needs_emulated"]

_native = native_module()
_ISAS = [] if _native is None else _native.supported_isas()

# The emulated variants are for tests alone, so what users install is without them.
needs_emulated = pytest.mark.skipif(
    not any(isa.startswith("emulated") for isa in _ISAS),
    reason="this build has no emulated kernels; `scripts/build-native` makes one in a clone, "
    "`pip install . --config-settings=cmake.define.QUIRE_TEST_KERNELS=ON` installs one (scripts/check-long tests it)",
)
