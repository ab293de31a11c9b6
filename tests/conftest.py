"""What every test may rely on, however the suite was started."""

from __future__ import annotations

import gc
import os
import signal

# A shell starts background jobs with SIGINT ignored, and Python then leaves it so; the tests of Ctrl-C need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The command says so to transformers in its own process, too late for one in which a test has imported it before.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def pytest_collection_finish() -> None:
    """What was imported until now stays: no collection in a test need walk through it, a quarter of a second each."""
    gc.collect()
    gc.freeze()
