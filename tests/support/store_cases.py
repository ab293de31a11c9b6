"""The shared stores under test, each with the same ways to damage, fill, stop and age it.

A case owns its server or folder; `tier` opens a remote tier over it, as another engine would.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.fake_s3 import ACCESS_KEY, SECRET_KEY, FakeS3, fake_s3
from support.mooncake_master import mooncake_master
from support.redis_server import redis_server, valkey_program
from support.until import until

from quire.tiers.peers.peer_wire import receive
from quire.tiers.remote.folder_files import FolderFiles
from quire.tiers.remote.folder_store import FolderStore
from quire.tiers.remote.limited_socket import Allowance
from quire.tiers.remote.mooncake_process import DELETE, EXISTS, GET, PUT
from quire.tiers.remote.mooncake_store import MooncakeStore
from quire.tiers.remote.remote_tier import RemoteTier

STORES = ("redis", "valkey", "s3", "folder", "mooncake")
FULL_PAUSE_S = 0.05


class RedisCase:
    """keeps: whether its values outlive a restart.."""

    keeps = False
    remedy_full, remedy_login = "maxmemory-policy", "give the password in the URL"

    def __init__(self, folder: Path, program: str | None) -> None:
        self._folder, self._program = folder, program
        self._stack = ExitStack()
        self.url = self._stack.enter_context(redis_server(folder, program=program))

    def tier(self, options: str = "", **arguments: Any) -> RemoteTier:
        query = f"?{options}" if options else ""
        return RemoteTier(self.url + query, **({"timeout": 10, "first_pause_s": FULL_PAUSE_S} | arguments))

    def _client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.url)

    def raw(self, key: bytes) -> bytes:
        with self._client() as client:
            return client.hget(_redis_name(key), "v")

    def write_raw(self, key: bytes, value: bytes) -> None:
        with self._client() as client:
            client.hset(_redis_name(key), "v", value)

    def copy_value(self, key: bytes, to: bytes) -> None:
        with self._client() as client:
            client.copy(_redis_name(key), _redis_name(to), replace=True)

    def age(self, key: bytes, seconds: float) -> None:
        with self._client() as client:
            left_ms = client.pttl(_redis_name(key)) - round(1000 * seconds)
            client.pexpire(_redis_name(key), left_ms)

    def skew(self, seconds: float) -> None:
        """A Redis server expires values by its own clock; clients tell no time."""

    def set_full(self, is_full: bool) -> None:
        with self._client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1" if is_full else "0")

    def stop(self) -> None:
        self._stack.close()

    def start(self) -> None:
        port = urlsplit(self.url).port
        self._stack.enter_context(redis_server(self._folder, port=port, program=self._program))

    def without_login(self, monkeypatch: pytest.MonkeyPatch) -> RemoteTier:
        with self._client() as client:
            client.config_set("requirepass", "sesame")
        return RemoteTier(self.url.replace("redis://", "redis://:wrong-secret@"), timeout=10)


def _redis_name(key: bytes) -> str:
    return "quire:kv:1:" + key.hex()


class S3Case:
    keeps = True
    remedy_full, remedy_login = "lifecycle rule", "check the credentials"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("boto3", reason="boto3 is not installed: pip install boto3")
        use_credentials(monkeypatch)
        self.server = FakeS3()
        self._stack = ExitStack()
        self.url, _ = self._stack.enter_context(fake_s3(self.server))

    def tier(self, options: str = "", **arguments: Any) -> RemoteTier:
        query = f"&{options}" if options else ""
        return RemoteTier(self.url + query, **({"timeout": 10, "first_pause_s": FULL_PAUSE_S} | arguments))

    def raw(self, key: bytes) -> bytes:
        return self.server.objects[self._name(key)][0]

    def write_raw(self, key: bytes, value: bytes) -> None:
        self.server.objects[self._name(key)] = (value, self.server.now())

    def copy_value(self, key: bytes, to: bytes) -> None:
        self.write_raw(to, self.raw(key))

    def age(self, key: bytes, seconds: float) -> None:
        value, stored_at = self.server.objects[self._name(key)]
        self.server.objects[self._name(key)] = (value, stored_at - seconds)

    def skew(self, seconds: float) -> None:
        self.server.ahead_s = seconds

    def set_full(self, is_full: bool) -> None:
        self.server.fault = lambda method: (507, "QuotaExceeded") if is_full and method == "PUT" else None

    def stop(self) -> None:
        self._stack.close()

    def start(self) -> None:
        endpoint = parse_qs(urlsplit(self.url).query)["endpoint"][0]
        self._stack.enter_context(fake_s3(self.server, port=urlsplit(endpoint).port or 0))

    def without_login(self, monkeypatch: pytest.MonkeyPatch) -> RemoteTier:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "sesame")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
        return self.tier()

    def _name(self, key: bytes) -> str:
        return f"tests/quire-kv-1/{key.hex()}"


def use_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `fake_s3`, and no others of this machine."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


class FaultyFiles(FolderFiles):
    """fault(operation): called before each call on a file; may raise or wait."""

    def __init__(self) -> None:
        self.fault: Callable[[str], None] = lambda operation: None

    def make(self, path: Path, mode: int) -> int:
        self.fault("make")
        return super().make(path, mode)

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        self.fault("write")
        return super().write(descriptor, parts, offset)

    def rename(self, path: Path, to: Path) -> None:
        self.fault("rename")
        super().rename(path, to)

    def read(self, path: Path, max_bytes: int) -> tuple[bytearray, os.stat_result]:
        self.fault("read")
        return super().read(path, max_bytes)

    def state(self, path: Path) -> os.stat_result | None:
        self.fault("state")
        return super().state(path)


class FolderCase:
    keeps = True
    remedy_full, remedy_login = "give the folder more room", "the right to read and write"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shared"
        self.url = f"folder://{self.folder}"
        self.files = FaultyFiles()
        self._ahead_s = 0.0

    def tier(self, options: str = "", **arguments: Any) -> RemoteTier:
        query = f"?{options}" if options else ""
        make = partial(FolderStore, files=self.files, clock=lambda: time.time() + self._ahead_s)
        keywords = {"timeout": 10, "first_pause_s": FULL_PAUSE_S, "make_store": make} | arguments
        return RemoteTier(self.url + query, **keywords)

    def path(self, key: bytes) -> Path:
        return self.folder / "quire-kv-1" / key.hex()[:2] / f"{key.hex()}.kv"

    def raw(self, key: bytes) -> bytes:
        return self.path(key).read_bytes()

    def write_raw(self, key: bytes, value: bytes) -> None:
        self.path(key).parent.mkdir(exist_ok=True)
        self.path(key).write_bytes(value)

    def copy_value(self, key: bytes, to: bytes) -> None:
        self.write_raw(to, self.raw(key))

    def age(self, key: bytes, seconds: float) -> None:
        state = self.path(key).stat()
        os.utime(self.path(key), (state.st_atime - seconds, state.st_mtime - seconds))

    def skew(self, seconds: float) -> None:
        self._ahead_s = -seconds

    def set_full(self, is_full: bool) -> None:
        self.files.fault = partial(_fail, ("write",), errno.ENOSPC) if is_full else lambda operation: None

    def stop(self) -> None:
        self.files.fault = partial(_fail, ("state", "read", "make"), errno.ESTALE)

    def start(self) -> None:
        self.files.fault = lambda operation: None

    def without_login(self, monkeypatch: pytest.MonkeyPatch) -> RemoteTier:
        self.files.fault = partial(_fail, ("state", "read", "make"), errno.EACCES)
        return self.tier()


def _fail(operations: Sequence[str], number: int, operation: str) -> None:
    if operation in operations:
        raise OSError(number, os.strerror(number))


class MooncakeCase:
    """A master, and a process whose memory is the pool: the one of `owner`."""

    keeps = False
    remedy_full = "give a URL segment=SIZE"
    segment_bytes = 16 << 20

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        # A lease as long as a test: what was looked up is not evicted. A process that is gone is soon known to be.
        self._options = ("--default_kv_lease_ttl=60000", "--client_ttl=2", *options)
        self._stack = ExitStack()
        self._ports = self._stack.enter_context(mooncake_master(folder, *self._options))
        self.url = f"mooncake://127.0.0.1:{self._ports[0]}/tests?metrics={self._ports[1]}"
        self._allowance = Allowance()
        self._fillers: list[str] = []
        self._own_memory()

    def tier(self, options: str = "", **arguments: Any) -> RemoteTier:
        query = f"&{options}" if options else ""
        return RemoteTier(self.url + query, **({"timeout": 10, "first_pause_s": FULL_PAUSE_S} | arguments))

    def ask(self, operation: int, name: str, value: bytes = b"") -> int:
        with self._allowance.exchange(60, 64 << 20):
            [status] = self.owner._ask(operation, [name], [memoryview(value)])
        return status

    def raw(self, key: bytes) -> bytes:
        names = [self.owner._name(key)]
        with self._allowance.exchange(60, 64 << 20), self.owner._answered(GET, names) as (connection, [size]):
            return receive(connection, size)

    def write_raw(self, key: bytes, value: bytes) -> None:
        """Mooncake refuses an empty value; one byte is as little a record."""
        self.ask(DELETE, self.owner._name(key))
        assert self.ask(PUT, self.owner._name(key), value or b"\0") == 0

    def copy_value(self, key: bytes, to: bytes) -> None:
        self.write_raw(to, self.raw(key))

    def write_memory(self, key: bytes, value: bytes) -> None:
        """Writes over the memory of a value, of which the master learns nothing."""
        told = json.loads(self.owner._fetch(f"query_key?key={self.owner._name(key)}"))
        assert self.owner._process is not None
        with open(f"/proc/{self.owner._process.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(told["data"][0]["buffer_address_"])
            memory.write(value)

    def set_full(self, is_full: bool) -> None:
        """By values that are leased, as are those of the test from now on: none is evicted."""
        if not is_full:
            while self._fillers:
                assert self.ask(DELETE, self._fillers.pop()) == 0
            return
        for item in list(self.owner.scan()):
            self.ask(EXISTS, self.owner._name(item.key))
        for num_bytes in (1 << 20, 1 << 16, 1 << 12, 1 << 8):
            while self.ask(PUT, name := f"filler {len(self._fillers)}", bytes(num_bytes)) == 0:
                self.ask(EXISTS, name)
                self._fillers.append(name)

    def stop(self) -> None:
        self._stack.close()
        self.kill_owner()

    def start(self) -> None:
        self.restart_master()
        self._own_memory()

    def restart_master(self) -> None:
        self._stack.close()
        self._stack.enter_context(mooncake_master(self._folder, *self._options, ports=self._ports))

    def kill_owner(self) -> None:
        if self.owner._process is not None:
            self.owner._process.kill()
        self.owner.close()

    def _own_memory(self) -> None:
        options = f"segment={self.segment_bytes}&buffer=16MiB"
        self.owner = MooncakeStore(f"{self.url}&{options}", self._allowance)
        until(self.is_owner_known)

    def is_owner_known(self) -> bool:
        """Whether the master gives out the owner's memory."""
        with suppress(Exception):
            return self.ask(PUT, "probe", b"probe") == 0 and self.ask(DELETE, "probe") == 0
        return False


StoreCase = RedisCase | S3Case | FolderCase | MooncakeCase


@contextmanager
def store_case(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreCase]:
    case: StoreCase
    match name:
        case "redis":
            case = RedisCase(folder, None)
        case "valkey":
            case = RedisCase(folder, valkey_program(folder))
        case "s3":
            case = S3Case(monkeypatch)
        case "mooncake":
            case = MooncakeCase(folder)
        case _:
            case = FolderCase(folder)
    try:
        yield case
    finally:
        case.stop()
