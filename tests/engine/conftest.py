"""One torch thread for these tests; and what a tier has is loaded, however quick computing it would be."""

from __future__ import annotations

import pytest
from support.one_thread import one_thread

from quire.tiers.stack import TierStack

__all__ = ["loading_takes_no_time", "one_thread"]


@pytest.fixture(autouse=True)
def loading_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether loading or computing takes longer depends on the machine's load: here loading is always worth it."""
    monkeypatch.setattr(TierStack, "estimate_seconds", lambda self, num_bytes, tier=None: 0.0)
