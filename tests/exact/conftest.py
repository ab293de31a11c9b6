"""One torch thread for these tests."""

from support.one_thread import one_thread

__all__ = ["one_thread"]
