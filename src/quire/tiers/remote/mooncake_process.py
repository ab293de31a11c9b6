"""The process of a Mooncake client, which `mooncake_store` starts by this file's path; it imports nothing of Quire.

Mooncake's `setup` and `close` keep the interpreter's lock while they wait for a master, its library starts 20 threads
and takes over signals, and its log goes to stderr: in a process of its own none of that reaches the engine.

    arguments   the descriptor of the control socket; the settings, JSON: the master's host and port, the client's own
                host ("": the one by which it reaches the master), and `setup` of MooncakeDistributedStore
    control     first, from here: u32, length of a text; the text, "" if the client is ready, else the reason why not.
                Then, to here: a byte with the descriptor of a connection. Its end ends the process
    question    u8, operation; u32, bytes of the names; u64, bytes of a value; names, with newlines between; the value
    answer      i64 for each name: 1 or 0 for EXISTS, a value's length for GET, 0 for the others, or a status of
                Mooncake, below 0; then for GET the values

Integers are little endian. A thread serves a connection.

Cost: a value crosses the connection once, and is copied once within Mooncake.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

__all__ = ["DELETE", "EXISTS", "GET", "HEALTH", "OBJECT_NOT_FOUND", "PUT", "QUESTION", "TEXT"]

EXISTS, GET, PUT, DELETE, HEALTH = range(5)
QUESTION, TEXT = struct.Struct("<BIQ"), struct.Struct("<I")
REPLICA_IS_NOT_READY, OBJECT_NOT_FOUND, TRANSFER_FAIL = -703, -704, -800  # of Mooncake
_CLOSE_S = 10


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    client, reason = _open(**settings)
    told = reason.encode()
    control.sendall(TEXT.pack(len(told)) + told)
    while client is not None:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        connection = socket.socket(fileno=descriptors[0])
        threading.Thread(target=_serve, args=(client, connection), daemon=True).start()
    if client is not None and settings["setup"]["global_segment_size"] != "0":
        signal.alarm(_CLOSE_S)  # `close` may wait for a master for ever, with the interpreter's lock
        client.close()
    os._exit(0)


def _open(host: str, port: int, own_host: str, seconds: float, setup: dict[str, str]) -> tuple[Any, str]:
    """(the client, "") or (None, why there is none). seconds: for the master to accept a connection."""
    try:
        make_client = import_module("mooncake.store").MooncakeDistributedStore
    except ImportError as error:
        return None, f"{error}; apt-get install libibverbs1 librdmacm1 libnl-3-200"
    try:
        with socket.create_connection((host, port), seconds) as connection:
            own_host = own_host or connection.getsockname()[0]
    except OSError as error:
        return None, f"{error}; start mooncake_master, or correct the address"
    client = make_client()
    status = client.setup({**setup, "local_hostname": own_host})
    return (client, "") if status == 0 else (None, f"Mooncake refuses these settings: status {status}")


def _serve(client: Any, connection: socket.socket) -> None:
    with connection:
        while front := _receive(connection, QUESTION.size):
            operation, num_name_bytes, num_value_bytes = QUESTION.unpack(front)
            names = _receive(connection, num_name_bytes).decode().split("\n")
            value = _receive(connection, num_value_bytes)
            numbers, values = _answer(client, operation, names, value)
            connection.sendall(struct.pack(f"<{len(numbers)}q", *numbers))
            for one in values:
                connection.sendall(memoryview(one).cast("B"))


def _answer(
    client: Any, operation: int, names: list[str], value: bytearray
) -> tuple[Sequence[int], Sequence[Any]]:
    """(numbers, values) of an answer."""
    if operation == GET:
        values = client.batch_get_buffer(names)
        unread = [name for name, one in zip(names, values, strict=True) if one is None]
        statuses = iter(_statuses_of_unread(client, unread))
        numbers = [next(statuses) if one is None else len(one) for one in values]
        return numbers, [one for one in values if one is not None]
    if operation == EXISTS:
        return client.batch_is_exist(names), ()
    if operation == PUT:
        return [client.put(names[0], value)], ()
    if operation == DELETE:
        status = client.remove(names[0], True)  # also within a lease
        return [OBJECT_NOT_FOUND if status == REPLICA_IS_NOT_READY else status], ()
    return [-client.health_check()], ()


def _statuses_of_unread(client: Any, names: list[str]) -> list[int]:
    """Mooncake gives None for a value that it does not have, and for one that it could not read."""
    if not names:
        return []
    found: list[int] = client.batch_is_exist(names)
    return [{0: OBJECT_NOT_FOUND, 1: TRANSFER_FAIL}.get(number, number) for number in found]


def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """So many bytes; none at the end of the connection."""
    received = bytearray(num_bytes)
    rest = memoryview(received)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            return bytearray()
        rest = rest[count:]
    return received


if __name__ == "__main__":
    _main()
