"""Makes engines always load a tier's values: the real choice between loading and computing depends on the machine's
load.

Tests of the choice itself replace `estimate_seconds` by their own; `tests/tiers`, which has the estimate itself under
test, has a fixture of this name that does nothing.
"""

from __future__ import annotations

import pytest

from quire.tiers.stack import TierStack

__all__ = ["loading_pays"]


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading is expected to take no time."""
    monkeypatch.setattr(TierStack, "estimate_seconds", lambda self, num_bytes, tier=None, num_segments=1: 0.0)
