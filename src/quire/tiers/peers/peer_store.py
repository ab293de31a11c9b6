"""The store in another engine's host memory, see `quire.tiers.remote.store_protocol`. It is only read.

Several threads may call at once; each uses a connection of its own, and connections are kept for later calls
(`connection_pool`).

Cost: a call is one round trip for each question; a value is received into its own buffer, without a further copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quire.peer_address import PeerAddress
from quire.tiers.peers.peer_wire import (
    ABSENT,
    ACCEPTED,
    CONTAINS,
    FRONT,
    LOAD,
    MAGIC,
    MAX_KEYS,
    NONCE_BYTES,
    QUESTION,
    WireError,
    proof,
    receive,
    receive_into,
)
from quire.tiers.remote.connection_pool import ConnectionPool
from quire.tiers.remote.limited_socket import Allowance, LimitedSocket
from quire.tiers.remote.store_protocol import Record, StoredItem

__all__ = ["PeerStore"]


class PeerStore:
    """See the module's text. Connects at the first call. secret: the peer's; None: it has none."""

    timeout_s = 1.0
    max_value_bytes: int | None = None
    time_outs: tuple[type[Exception], ...] = (TimeoutError,)

    def __init__(self, address: PeerAddress, allowance: Allowance, secret: bytes | None = None) -> None:
        self.where = f"the peer {address}"
        self._address = address
        self._allowance = allowance
        self._secret = secret or b""
        self._pool = ConnectionPool(self._connect)

    def ping(self) -> None:
        with self._pool.connection():
            pass

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        with self._pool.connection() as connection:
            for first in range(0, len(keys), MAX_KEYS):
                some = keys[first : first + MAX_KEYS]
                connection.sendall(QUESTION.pack(CONTAINS, len(some)) + b"".join(some))
                answer = receive(connection, len(some))
                if answer.strip(b"\0\1"):
                    raise WireError("an answer of the wrong form")
                found += [byte == 1 for byte in answer]
        return found

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        with self._pool.connection() as connection:
            return [self._get(connection, key) for key in keys]

    def _get(self, connection: LimitedSocket, key: bytes) -> Record | None:
        connection.sendall(QUESTION.pack(LOAD, 1) + key)
        num_bytes, checksum = FRONT.unpack(receive(connection, FRONT.size))
        if num_bytes == ABSENT:
            return None
        if num_bytes > self._allowance.bytes_left():
            raise WireError(f"a value of {num_bytes} bytes, more than any that this engine stores")
        value = np.empty(num_bytes, np.uint8).data
        receive_into(connection, value)
        return Record([value.toreadonly()], checksum, b"")

    def refresh(self, key: bytes) -> bool:
        return False

    def put(self, key: bytes, record: Record) -> bool:
        raise WireError("a peer stores what it computes, and nothing else")

    def delete(self, key: bytes) -> bool:
        return False

    def scan(self) -> Iterator[StoredItem]:
        return iter(())

    def is_refusal(self, error: Exception) -> bool:
        return False

    def explain_error(self, error: Exception) -> str:
        return str(error)

    def reset(self) -> None:
        """The connection of a failed call is closed already."""

    def close(self) -> None:
        self._pool.close()

    def _connect(self) -> LimitedSocket:
        made = LimitedSocket(self._address.connect(self._allowance.seconds_left()), self._allowance)
        try:
            greeting = receive(made, len(MAGIC) + NONCE_BYTES)
            if not greeting.startswith(MAGIC):
                raise WireError("it is no peer of this version")
            made.sendall(proof(self._secret, greeting[len(MAGIC) :]))
            if receive(made, 1) != ACCEPTED:
                raise WireError(
                    "it has another remote_secret or peer_secret, or only one of the two engines has one"
                )
        except BaseException:
            made.close()
            raise
        return made
