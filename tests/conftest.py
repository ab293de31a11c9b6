"""Settings that hold in every test, however the suite was started."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

from support.checked_steps import checked_steps
from support.loading_pays import loading_pays
from support.one_in import pytest_addoption, pytest_collection_modifyitems
from support.one_thread import one_thread

__all__ = ["checked_steps", "loading_pays", "one_thread", "pytest_addoption", "pytest_collection_modifyitems"]

# A shell starts background jobs with SIGINT ignored, and Python then leaves it so; the tests of Ctrl-C need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The command says so to transformers in its own process, too late for one in which a test has imported it before.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# Triton's interpreter runs the kernels of tests/cuda. Triton reads this at its import and for each kernel; a process
# that compiles kernels unsets it.
os.environ["TRITON_INTERPRET"] = "1"

# No test keeps weights in the user's cache, nor finds any there. Tests of what is kept name a folder.
os.environ["QUIRE_PACKED_WEIGHTS"] = "off"

# httpx reads all certificates of the machine for every client and every `httpx.post`, 20 ms each. No test speaks TLS:
# this names a folder that has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)


def pytest_collection_finish() -> None:
    """What was imported until now stays: no collection in a test need walk through it, a quarter of a second each."""
    gc.collect()
    gc.freeze()
