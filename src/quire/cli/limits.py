"""Which limit of the machine an error comes from, in one line: what was to be had, and what raises it.

Not a check ahead of time: the library asks for what it was told to take, and a system that refuses says so in many ways
(an import that cannot be mapped, a failed allocation, a thread that does not start). Cost: nothing until then.
"""

from __future__ import annotations

import errno
import resource

from quire.sizes import format_size

__all__ = ["limit_behind"]

_NO_MEMORY = (
    "cannot allocate memory",
    "can't allocate memory",
    "failed to map segment",
    "bad_alloc",
    "bad allocation",
)
_NO_THREAD = ("can't start new thread", "resource temporarily unavailable")


def limit_behind(error: BaseException) -> str | None:
    """What to say of it; None: no limit of the machine's."""
    text, number = str(error).lower(), error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        most = _limit(resource.RLIMIT_NOFILE)
        return f"no file can be opened any more, at most {most} may be open (ulimit -n): {error}"
    if any(words in text for words in _NO_THREAD):
        return (
            f"no thread can be started any more: at most {_limit(resource.RLIMIT_NPROC)} processes and threads "
            "(ulimit -u), or what the control group allows (pids.max)"
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(words in text for words in _NO_MEMORY):
        limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
        has_limit = limit_bytes != resource.RLIM_INFINITY
        address = (
            f", whose address space is limited to {format_size(limit_bytes)} (ulimit -v)" if has_limit else ""
        )
        return f"the system refuses memory to this process{address}: {str(error) or 'it gives no reason'}"
    return None


def _limit(kind: int) -> str:
    most = resource.getrlimit(kind)[0]
    return "any number of" if most == resource.RLIM_INFINITY else str(most)
