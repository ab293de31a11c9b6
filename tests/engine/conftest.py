"""A proof of each model once a process."""

from support.proved_once import proved_once

__all__ = ["proved_once"]
