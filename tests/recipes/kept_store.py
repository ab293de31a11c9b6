"""The recipe's smallest store: records that a URL names, kept in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.tiers.by_url import register_store
from quire.tiers.remote.store_protocol import Record, StoredItem

SCHEME = "records"
KEPT: dict[str, dict[bytes, Record]] = {}


class KeptStore:
    where = "this process"
    timeout_s = 1.0
    max_value_bytes: int | None = None
    time_outs: tuple[type[Exception], ...] = (TimeoutError,)

    def __init__(self, url: str, allowance: object, ttl_s: float | None) -> None:
        self.records = KEPT.setdefault(url, {})

    def ping(self) -> None: ...

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.records for key in keys]

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        return [self.records.get(key) for key in keys]

    def refresh(self, key: bytes) -> bool:
        return key in self.records

    def put(self, key: bytes, record: Record) -> bool:
        self.records[key] = Record([memoryview(b"".join(record.parts))], record.checksum, record.info)
        return True

    def delete(self, key: bytes) -> bool:
        return self.records.pop(key, None) is not None

    def scan(self) -> Iterator[StoredItem]:
        for key, record in list(self.records.items()):
            yield StoredItem(key, sum(part.nbytes for part in record.parts), None)

    def is_refusal(self, error: Exception) -> bool:
        return False

    def explain_error(self, error: Exception) -> str:
        return str(error)

    def reset(self) -> None: ...

    def close(self) -> None: ...


register_store(SCHEME, KeptStore)
