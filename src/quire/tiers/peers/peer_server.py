"""`PeerServer`: gives the values of this engine's host tier to its peers, over TCP or a Unix socket.

A thread for each connection; no thread of the engine takes part. The tier gives a value as a view that stays valid
while it is referred to, and a value never changes: a value that is evicted while it is sent arrives whole. A client
that sends anything but a question, that does not prove the secret, or that takes no bytes for `IDLE_S`, is
disconnected.

With a secret every value is followed by its signature (`quire.tiers.remote.signed`), made as it is sent.

Invariants
    V1  the sent value is the tier's, of the key that was asked for, or the connection ends inside of it.
    V2  after `close` no thread, connection or listening socket of it is left.

Cost: a value is sent without a copy, after a pass of XXH3; with a secret one of SHA-256.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from quire.peer_address import PeerAddress
from quire.tiers.peers.peer_wire import (
    ABSENT,
    ACCEPTED,
    CONTAINS,
    FRONT,
    KEY_BYTES,
    LOAD,
    MAGIC,
    MAX_KEYS,
    NONCE_BYTES,
    PROOF_BYTES,
    QUESTION,
    REFUSED,
    WireError,
    proof,
    receive,
)
from quire.tiers.remote.record import checksum
from quire.tiers.remote.signed import Signer
from quire.tiers.tier import Tier

__all__ = ["IDLE_S", "PeerServer"]

IDLE_S = 600.0
_GREETING_S = 10.0
_MAX_CONNECTIONS = 256

_log = logging.getLogger("quire")


class PeerServer:
    """See the module's text. Listens until `close`. tier: whose values it gives. secret: that clients prove; None: any
    client is served.

    *raises:* OSError: the address cannot be listened to.
    """

    def __init__(self, address: PeerAddress, tier: Tier, secret: bytes | None = None) -> None:
        self._tier = tier
        self._secret = secret or b""
        self._signer = None if secret is None else Signer(secret)
        self._lock = threading.Lock()
        self._closing = False
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._counts = {
            "num_peer_questions": 0,
            "num_peer_values": 0,
            "peer_sent_bytes": 0,
            "num_refused_peers": 0,
        }
        self._listener = address.listen()
        self.address = address
        if not address.path:
            host, port = self._listener.getsockname()[:2]
            self.address = PeerAddress(host, port)
        self._thread = threading.Thread(target=self._accept, name="quire-peers", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        """Connections now. Since the start: questions; values sent and their bytes; clients without the secret, or
        beyond the limit of connections."""
        with self._lock:
            return {"num_peer_connections": len(self._connections), **self._counts}

    def close(self) -> None:
        """Ends all connections, joins the threads. A second call does nothing."""
        with self._lock:
            self._closing = True
            connections = list(self._connections.items())
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        for connection, _ in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for _, thread in connections:
            thread.join()
        if self.address.path:
            Path(self.address.path).unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing or self._listener.fileno() < 0:
                    return
                _log.warning("peers cannot connect: %s", error)  # no file handles are left, say
                threading.Event().wait(1.0)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="quire-peer", daemon=True)
            with self._lock:
                is_welcome = not self._closing and len(self._connections) < _MAX_CONNECTIONS
                if is_welcome:
                    self._connections[connection] = thread
                else:
                    self._counts["num_refused_peers"] += 1
            if is_welcome:
                thread.start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_GREETING_S)
            if self._greet(connection):
                connection.settimeout(IDLE_S)
                while True:
                    self._answer(connection)
        except OSError as error:
            _log.debug("the connection of a peer ended: %s", error)
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _greet(self, connection: socket.socket) -> bool:
        """Whether the client has proved that it knows the secret."""
        nonce = os.urandom(NONCE_BYTES)
        connection.sendall(MAGIC + nonce)
        is_right = hmac.compare_digest(receive(connection, PROOF_BYTES), proof(self._secret, nonce))
        if not is_right:
            self._count(num_refused_peers=1)
        connection.sendall(ACCEPTED if is_right else REFUSED)
        return is_right

    def _answer(self, connection: socket.socket) -> None:
        question, num_keys = QUESTION.unpack(receive(connection, QUESTION.size))
        if (
            not 0 < num_keys <= MAX_KEYS
            or question not in (CONTAINS, LOAD)
            or (question == LOAD) > (num_keys == 1)
        ):
            raise WireError(f"a question {question} about {num_keys} keys")
        packed = receive(connection, num_keys * KEY_BYTES)
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        if question == CONTAINS:
            self._count(num_peer_questions=1)
            connection.sendall(bytes(self._tier.contains(keys)))
            return
        value = self._tier.load(keys[0])
        if value is None:
            self._count(num_peer_questions=1)
            connection.sendall(FRONT.pack(ABSENT, bytes(8)))
            return
        parts = [value] if self._signer is None else [value, self._signer.signature(keys[0], [value])]
        num_bytes = sum(map(len, parts))
        self._count(num_peer_questions=1, num_peer_values=1, peer_sent_bytes=num_bytes)
        connection.sendall(FRONT.pack(num_bytes, checksum(keys[0], parts)))
        for part in parts:
            connection.sendall(part)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, by in counts.items():
                self._counts[name] += by
