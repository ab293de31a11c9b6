"""A Redis server without a network: sockets whose other end is a dict, with a fault at any chosen call.

It speaks RESP2, as far as the remote tier and redis-py's handshake use it, so that redis-py itself runs in the tests.
Time passes only when a call waits in vain: by the socket's time-out, on the given clock.
"""

from __future__ import annotations

from collections.abc import Callable

from support.tiers_case import Clock

Fault = str | None
FAULTS = (
    "reset",
    "refuse",
    "hang",
    "garbage",
    "cut",
    "flip",
    "longer",
    "endless",
    "closed",
    "oom",
    "noauth",
    "extra",
)


class FakeRedis:
    """fault(call): asked at every "connect", "send" and "receive"; one of FAULTS, or None."""

    def __init__(self, clock: Clock, fault: Callable[[str], Fault] = lambda call: None) -> None:
        self.clock = clock
        self.fault = fault
        self.hashes: dict[bytes, dict[bytes, bytes]] = {}
        self.num_commands = 0

    def connect(self) -> _FakeSocket:
        match self.fault("connect"):
            case None:
                return _FakeSocket(self)
            case "hang":
                self.clock.now += 1.0
                raise TimeoutError
            case _:
                raise ConnectionRefusedError(111, "Connection refused")

    def answer(self, command: list[bytes]) -> bytes:
        self.num_commands += 1
        name, *rest = command
        match name.upper():
            case b"PING":
                return b"+PONG\r\n"
            case b"CLIENT":
                return b"+OK\r\n"
            case b"EXISTS" | b"TOUCH":
                return b":%d\r\n" % (rest[0] in self.hashes)
            case b"HMGET":
                fields = self.hashes.get(rest[0], {})
                values = [_bulk(fields.get(field)) for field in rest[1:]]
                return b"*%d\r\n" % len(values) + b"".join(values)
            case b"HSET":
                fields = self.hashes.setdefault(rest[0], {})
                fields.update(zip(rest[1::2], rest[2::2], strict=True))
                return b":%d\r\n" % (len(rest) // 2)
            case b"DEL":
                return b":%d\r\n" % (self.hashes.pop(rest[0], None) is not None)
            case _:
                return b"-ERR unknown command\r\n"


class _FakeSocket:
    def __init__(self, server: FakeRedis) -> None:
        self._server = server
        self._input = bytearray()
        self._output = bytearray()
        self._timeout: float | None = None
        self._ended = False

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        fault = self._server.fault("send")
        if fault == "hang":
            self._wait_in_vain()
        if fault in ("reset", "closed", "refuse"):
            raise ConnectionResetError(104, "Connection reset by peer")
        self._input += data
        while (command := self._next_command()) is not None:
            answer = self._server.answer(command) if fault is None else self._wrong(command, fault)
            self._output += answer

    def recv(self, size: int) -> bytes:
        if self._timeout == 0:
            if self._output:
                return self._take(size)
            if self._ended:
                return b""
            raise BlockingIOError(11, "Resource temporarily unavailable")
        match self._server.fault("receive"):
            case "hang":
                self._wait_in_vain()
            case "reset" | "refuse":
                raise ConnectionResetError(104, "Connection reset by peer")
            case "closed" | "cut":
                del self._output[len(self._output) // 2 :]
                self._ended = True
            case "garbage":
                self._output[:] = b"HTTP/1.1 400 Bad Request\r\n\r\n"
            case "flip" if self._output:
                self._output[len(self._output) // 2] ^= 0x20
            case "longer":
                self._output[:] = b"$99999999999\r\nnot that long\r\n"
            case "endless":
                return b"x" * size
            case _:
                pass
        if self._output:
            return self._take(size)
        if self._ended:
            return b""
        self._wait_in_vain()
        raise AssertionError

    def shutdown(self, how: int) -> None:
        self._ended = True

    def close(self) -> None:
        self._ended = True

    def fileno(self) -> int:
        return -1

    def _take(self, size: int) -> bytes:
        taken = bytes(self._output[:size])
        del self._output[:size]
        return taken

    def _wait_in_vain(self) -> None:
        assert self._timeout is not None, "a wait without an end"
        self._server.clock.now += self._timeout
        raise TimeoutError("timed out")

    def _wrong(self, command: list[bytes], fault: str) -> bytes:
        match fault:
            case "oom" if command[0].upper() == b"HSET":
                return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
            case "noauth":
                return b"-NOAUTH Authentication required.\r\n"
            case "extra":
                return self._server.answer(command) + b":1\r\n"
            case "flip" if command[0].upper() == b"HSET":
                command[3] = bytes([command[3][0] ^ 1]) + command[3][1:]
                return self._server.answer(command)
            case _:
                return self._server.answer(command)

    def _next_command(self) -> list[bytes] | None:
        """Takes one whole command, *N then N times $length, from the input."""
        position = 0

        def line() -> bytes | None:
            nonlocal position
            end = self._input.find(b"\r\n", position)
            if end < 0:
                return None
            text, position = bytes(self._input[position:end]), end + 2
            return text

        head = line()
        if head is None:
            return None
        words: list[bytes] = []
        for _ in range(int(head[1:])):
            length = line()
            if length is None or len(self._input) < position + int(length[1:]) + 2:
                return None
            words.append(bytes(self._input[position : position + int(length[1:])]))
            position += int(length[1:]) + 2
        del self._input[:position]
        return words


def _bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
