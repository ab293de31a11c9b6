"""Names the limit of the machine that an error comes from: its value, and the command that raises it.

Nothing is checked ahead of time. A system that refuses memory, files or threads reports it in many ways (an import
that cannot be mapped, a failed allocation, a thread that does not start), and this file recognises them afterwards.
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
    """A description of the limit; None if no limit of the machine caused the error."""
    text, number = str(error).lower(), error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        limit = _limit(resource.RLIMIT_NOFILE)
        return f"cannot open another file: the limit is {limit} open files (ulimit -n): {error}"
    if any(words in text for words in _NO_THREAD):
        return (
            f"cannot start another thread: the limit is {_limit(resource.RLIMIT_NPROC)} processes and threads "
            "(ulimit -u), or that of the control group (pids.max)"
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
    limit = resource.getrlimit(kind)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
