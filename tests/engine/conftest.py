"""A proof of each model once a process; and what a tier has is loaded, however quick computing it would be."""

from __future__ import annotations

import pytest
from support.proved_once import proved_once

from quire.tiers.stack import TierStack

__all__ = ["loading_takes_no_time", "proved_once"]


@pytest.fixture(autouse=True)
def loading_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether loading or computing takes longer depends on the machine's load: here loading is always worth it."""
    monkeypatch.setattr(TierStack, "estimate_seconds", lambda self, num_bytes, tier=None: 0.0)
