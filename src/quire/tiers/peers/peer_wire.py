"""The messages between a peer that asks for values and one that gives them.

    greeting   server: b"QUIRE-PEER-1" and 16 random bytes; client: 32 bytes, HMAC-SHA256 of both under the secret
               (an empty one without); server: one byte, `ACCEPTED` or `REFUSED`
    question   one byte, `CONTAINS` or `LOAD`; u32, number of keys; the keys, `KEY_BYTES` each
    answer     CONTAINS: a byte 0 or 1 for each key. LOAD, of one key: u64, the value's length, or `ABSENT`; 8 bytes,
               its checksum (`quire.tiers.remote.record`); the value

Integers are little endian. The greeting proves that the client knows the secret, and cannot be used twice. Nothing is
encrypted.
"""

from __future__ import annotations

import hmac
import struct
from typing import Any

__all__ = [
    "ABSENT",
    "ACCEPTED",
    "CONTAINS",
    "FRONT",
    "KEY_BYTES",
    "LOAD",
    "MAGIC",
    "MAX_KEYS",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "QUESTION",
    "REFUSED",
    "WireError",
    "proof",
    "receive",
    "receive_into",
]

MAGIC = b"QUIRE-PEER-1"
NONCE_BYTES, PROOF_BYTES, KEY_BYTES = 16, 32, 32
ACCEPTED, REFUSED = b"+", b"-"
CONTAINS, LOAD = 1, 2
QUESTION, FRONT = struct.Struct("<BI"), struct.Struct("<Q8s")
ABSENT = (1 << 64) - 1
MAX_KEYS = 1 << 16
"""Of a question."""


class WireError(OSError):
    """Bytes that are no message of this protocol, or the end of the connection inside of one."""


def proof(secret: bytes, nonce: bytes) -> bytes:
    """The client's answer to a greeting."""
    return hmac.digest(b"quire peer\0" + secret, MAGIC + nonce, "sha256")


def receive_into(connection: Any, buffer: memoryview) -> None:
    """Fills the buffer. *raises:* OSError; WireError: the connection ended before that."""
    while buffer:
        num_bytes = connection.recv_into(buffer)
        if not num_bytes:
            raise WireError("the connection ended inside of a message")
        buffer = buffer[num_bytes:]


def receive(connection: Any, num_bytes: int) -> bytes:
    """The next bytes. *raises:* as `receive_into`."""
    received = bytearray(num_bytes)
    receive_into(connection, memoryview(received))
    return bytes(received)
