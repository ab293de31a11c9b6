"""`PrefillSockets`: the Unix sockets at which the prefill replicas of a cluster on one machine give their prefixes.

Each address is a place, which a replica holds while its process lives: the system releases the lock of a process that
is killed. There are more places than replicas, so that a new one starts while an old one ends. Engines ask all places;
an empty one answers at once.

Cost: a file for each place.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path

from quire.errors import QuireError

__all__ = ["PrefillSockets"]

_PLACES_EACH = 2  # places for each replica


class PrefillSockets:
    """secret: of the cluster; it names the folder. num_replicas: those that give prefixes."""

    def __init__(self, secret: bytes, num_replicas: int) -> None:
        name = hashlib.blake2b(secret, digest_size=8, person=b"quire.prefill").hexdigest()
        self._folder = Path(tempfile.gettempdir()) / f"quire-{os.getuid()}-{name}"
        self._num_places = _PLACES_EACH * num_replicas
        self._lock = -1  # of the own place

    @property
    def addresses(self) -> list[str]:
        """All places, as `peers` takes them."""
        return [self._address(place) for place in range(self._num_places)]

    def take(self) -> str:
        """A free address, for `peer_listen`; it is this process's until it ends. *raises:* QuireError: none is free."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if (owner := self._folder.lstat()).st_uid != os.getuid() or owner.st_mode & 0o077:
            raise QuireError(
                f"expected a folder that only this user can open, got another one: {self._folder}; remove it"
            )
        for place in range(self._num_places):
            lock = os.open(self._folder / f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock = lock
            return self._address(place)
        raise QuireError(f"expected a free place of {self._num_places} for a prefill replica, got none")

    def _address(self, place: int) -> str:
        return f"unix:{self._folder}/{place}.sock"
