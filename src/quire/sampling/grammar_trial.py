"""`try_grammar`: builds a grammar in a process of its own first, so that none takes too much time or memory here.

Most grammars are ready within a millisecond. Some of a few bytes take minutes and gigabytes, which no limit of
llguidance 1.x bounds: `{"pattern": "\\n", "maxLength": 1000000}`, or `{"multipleOf": 1234567}`, where a million states
are searched for a text of that form. Such a call cannot be ended; a process can.

Not a check of the grammar: the trial knows no model's tokens, so that only "too much" counts of its result.

Cost: 70 ms, most of them the start of Python; `_MAX_CPU_S` at worst.
"""

from __future__ import annotations

import subprocess
import sys

__all__ = ["try_grammar"]

_MAX_CPU_S = 2
_MAX_WALL_S = 20  # on a machine that is busy with other things
_MAX_BYTES = 2 << 30  # of address space, a fifth of it Python's

_TRIAL = """
import os, resource, sys
os.nice(5)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1]) + 1))
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
from llguidance import LLMatcher, LLTokenizer
LLMatcher(LLTokenizer("byte"), sys.stdin.read()).compute_bitmask()
os._exit(0)
"""


def try_grammar(grammar: str) -> None:
    """Builds the grammar in another process. *raises:* ValueError: too much time or memory."""
    limits = [str(_MAX_CPU_S), str(_MAX_BYTES)]
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL, *limits],
            input=grammar.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(_too_much()) from None
    if ended.returncode < 0:  # by a signal: out of time, out of memory, out of stack
        raise ValueError(_too_much())


def _too_much() -> str:
    return (
        f"it takes more than {_MAX_CPU_S} s or {_MAX_BYTES >> 30} GiB to work out; lower its lengths, counts and "
        f"multiples, or leave them out"
    )
