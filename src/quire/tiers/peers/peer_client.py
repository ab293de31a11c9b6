"""`PeerClient`: asks one peer for values, within limits of seconds and bytes.

An exchange takes at most `timeout` seconds and `max_value_bytes`, whatever the peer does. After a failure the peer is
left alone for a pause (`circuit_breaker`), and the first call after it decides. Several threads may call at once; each
uses a connection of its own, and connections are kept for later calls.

Invariants
    W1  a connection whose exchange failed is closed: no answer is taken for that of another question.

Cost: a call is one round trip; a value is received into its own buffer, without a further copy.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from quire.peer_address import PeerAddress
from quire.tiers.circuit_breaker import CircuitBreaker
from quire.tiers.peers.peer_wire import (
    ABSENT,
    ACCEPTED,
    CONTAINS,
    LENGTH,
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
from quire.tiers.remote.limited_socket import Allowance, LimitedSocket
from quire.tiers.tier import TierError, UnavailableError

__all__ = ["PeerClient"]

_SMALL_BYTES = 1 << 20  # of an answer without a value


class PeerClient:
    """See the module's text. Connects at the first call.

    *raises (the calls):* TierError: no answer, or another than this protocol has; UnavailableError: a call during the
    pause after that.
    """

    def __init__(
        self,
        address: PeerAddress,
        secret: bytes | None = None,
        *,
        timeout: float = 1.0,
        max_value_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.max_value_bytes = max_value_bytes
        self._secret = secret or b""
        self._timeout = timeout
        self._allowance = Allowance(clock)
        self._breaker = CircuitBreaker(clock=clock)
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._is_closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the peer has its value. A use of none."""
        found: list[bool] = []
        for first in range(0, len(keys), MAX_KEYS):
            some = keys[first : first + MAX_KEYS]
            with self._exchange("a look-up", _SMALL_BYTES) as connection:
                connection.sendall(QUESTION.pack(CONTAINS, len(some)) + b"".join(some))
                answer = receive(connection, len(some))
                if answer.strip(b"\0\1"):
                    raise WireError("an answer of the wrong form")
                found += [byte == 1 for byte in answer]
        return found

    def load(self, key: bytes) -> memoryview | None:
        """The value, unchecked; None: the peer has none."""
        with self._exchange("a load", self.max_value_bytes + _SMALL_BYTES) as connection:
            connection.sendall(QUESTION.pack(LOAD, 1) + key)
            (num_bytes,) = LENGTH.unpack(receive(connection, LENGTH.size))
            if num_bytes == ABSENT:
                return None
            if num_bytes > self.max_value_bytes:
                raise WireError(f"a value of {num_bytes} bytes, of at most {self.max_value_bytes}")
            value = np.empty(num_bytes, np.uint8).data
            receive_into(connection, value)
            return value.toreadonly()

    def ping(self) -> None:
        """Connects, if there is no connection, and greets."""
        with self._exchange("a greeting", _SMALL_BYTES):
            pass

    def close(self) -> None:
        """Closes the idle connections; a call under way closes its own."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _exchange(self, operation: str, num_bytes: int) -> Iterator[Any]:
        call = self._breaker.begin()
        trial = self._breaker.begin_trial() if call is None else None
        if self._is_closed or (call is None and trial is None):
            raise UnavailableError(f"the peer {self.address} failed a short time ago")
        number = call if call is not None else trial
        assert number is not None
        connection: Any = None
        try:
            with self._allowance.exchange(self._timeout, num_bytes):
                connection = self._connection()
                yield connection
        except Exception as error:
            self._breaker.record_failure(number)
            reason = (
                f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            )
            raise TierError(f"{operation} at the peer {self.address}: {reason}") from error
        except BaseException:  # an interrupted caller
            self._breaker.record_failure(number)
            raise
        else:
            if trial is not None:
                self._breaker.record_success(trial)
            with self._lock:
                if not self._is_closed:
                    self._idle.append(connection)
                    connection = None
        finally:
            if connection is not None:
                connection.close()

    def _connection(self) -> Any:
        """An idle connection that the peer has not closed, or a new one, greeted."""
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            if idle is None:
                break
            if not _is_over(idle):
                return idle
            idle.close()
        made = LimitedSocket(self.address.connect(self._allowance.seconds_left()), self._allowance)
        try:
            greeting = receive(made, len(MAGIC) + NONCE_BYTES)
            if not greeting.startswith(MAGIC):
                raise WireError("it is no peer of this version")
            made.sendall(proof(self._secret, greeting[len(MAGIC) :]))
            if receive(made, 1) != ACCEPTED:
                raise WireError("it has another remote_secret, or only one of the two engines has one")
        except BaseException:
            made.close()
            raise
        return made


def _is_over(connection: Any) -> bool:
    """Whether an idle connection has an end, or bytes that belong to no answer."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
