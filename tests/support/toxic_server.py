"""Servers that misbehave as Redis servers, each in its own way: a thread and a plain socket each."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def toxic_server(habit: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """The URL of a server that does `habit(connection, stop)` to everyone who connects."""
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            with suppress(OSError):  # the client has had enough
                habit(connection, stop)

    def listen() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    threads.append(threading.Thread(target=listen))
    threads[0].start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        for thread in list(threads):
            thread.join(10)
        listener.close()


def says(answer: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """Answers whatever it is sent with these bytes."""

    def habit(connection: socket.socket, stop: threading.Event) -> None:
        while not stop.is_set() and connection.recv(1 << 16):
            connection.sendall(answer)

    return habit


def hangs(connection: socket.socket, stop: threading.Event) -> None:
    stop.wait(30)


def closes(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(1)


def drips(connection: socket.socket, stop: threading.Event) -> None:
    """Always about to say something: a byte every now and then, so that no single wait is long."""
    connection.sendall(b"$100000\r\n")
    while not stop.wait(0.02):
        connection.sendall(b"x")


def floods(connection: socket.socket, stop: threading.Event) -> None:
    """Announces much and sends it as fast as it can."""
    connection.sendall(b"$99999999999\r\n")
    while not stop.is_set():
        connection.sendall(b"x" * (1 << 20))
