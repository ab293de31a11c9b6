"""The store in a bucket of S3 or of a server with its protocol, with boto3.

    s3://BUCKET[/PREFIX]?endpoint=http://HOST:PORT&region=NAME&addressing=path

    <prefix>/quire-kv-1/<key, hex>    an object: the record, see `record`

boto3 finds the credentials (environment, shared files, roles) when the store is opened; a URL has none. A bucket has
no cap and no order of eviction: give it a lifecycle rule. An object's age is the difference of two times of the server
(of the answer, of the last change), so the clocks of clients do not matter. An expired value is a miss; a load of its
key removes it, a store replaces it.

Cost: `exists` one HEAD a key and `get` one GET a key, up to 8 at once; `put` one PUT, with one copy and one pass of
SHA-256 (not over TLS).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from importlib import import_module
from typing import Any

from quire.errors import ArgumentError, BackendError
from quire.tiers.remote.limited_socket import Allowance
from quire.tiers.remote.record import pack, unpack
from quire.tiers.remote.store_protocol import Record, StoredItem
from quire.tiers.remote.store_url import take_options
from quire.tiers.remote.timed_calls import TimedCalls
from quire.tiers.tier import TierError

__all__ = ["S3Store"]

_FOLDER = "quire-kv-1/"
_NUM_THREADS = 8
_SCAN_S, _SCAN_BYTES = 60.0, 4 << 20  # of one page of a list
_FULL = {"InsufficientCapacity", "QuotaExceeded", "XMinioStorageFull"}
_LOGINS = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403"}


class S3Store:
    """See the module's text, and `store_protocol.Store`.

    *raises:* BackendError: boto3 is not installed. ArgumentError: an invalid URL. TierError: no credentials.
    """

    timeout_s = 5.0
    max_value_bytes: int | None = 5 << 30  # of one PUT

    def __init__(self, url: str, allowance: Allowance, ttl_s: float | None = None) -> None:
        bucket, self._prefix, options = _parts(url)
        self._bucket = bucket
        self._ttl_s = ttl_s
        self._allowance = allowance
        boto3 = _boto3()
        config, errors = import_module("botocore.config"), import_module("botocore.exceptions")
        from urllib3.exceptions import ReadTimeoutError

        from quire.tiers.remote.limited_http import LimitedHttp

        self._refusals: tuple[type[Exception], ...] = (errors.ClientError,)
        self.time_outs: tuple[type[Exception], ...] = (TimeoutError, ReadTimeoutError)
        session = boto3.session.Session()
        try:
            self._credentials = session.get_credentials()
            self._client: Any = session.client(
                "s3",
                endpoint_url=options.get("endpoint"),
                region_name=options.get("region") or session.region_name or "us-east-1",
                config=config.Config(
                    retries={"total_max_attempts": 1},
                    s3={"addressing_style": options.get("addressing", "auto")},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )
        except (errors.BotoCoreError, ValueError) as error:  # a broken file, an endpoint that is no URL
            raise ArgumentError(
                f"expected a bucket that boto3 can open, got: {error} - in `remote_cache`"
            ) from None
        if self._credentials is None:
            raise TierError(
                f"expected credentials for s3://{bucket}, found none; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or another way of boto3"
            )
        endpoint = self._client.meta.endpoint_url
        self.where = f"{endpoint}/{bucket}"
        self._http = LimitedHttp(endpoint, allowance, session._session.get_config_variable("ca_bundle"))
        self._client.meta.events.register("before-send.s3", self._http.send)
        self._calls = TimedCalls("quire-tier-s3", _NUM_THREADS, allowance)

    def ping(self) -> None:
        self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        if len(keys) == 1:
            return [self._age_s(keys[0]) is not None]
        found = self._calls.run([partial(self._age_s, key) for key in keys])
        return [age_s is not None for age_s in found]

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        if len(keys) == 1:
            return [self._get(keys[0])]
        return self._calls.run([partial(self._get, key) for key in keys])

    def refresh(self, key: bytes) -> bool:
        age_s = self._age_s(key)
        return age_s is not None and (self._ttl_s is None or 2 * age_s < self._ttl_s)

    def put(self, key: bytes, record: Record) -> bool:
        self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=b"".join(pack(record)))
        return True

    def delete(self, key: bytes) -> bool:
        is_there = self._head(key) is not None
        self._client.delete_object(Bucket=self._bucket, Key=self._name(key))
        return is_there

    def scan(self) -> Iterator[StoredItem]:
        token: dict[str, str] = {}
        while True:
            with self._allowance.exchange(_SCAN_S, _SCAN_BYTES):
                page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, **token)
            for item in page.get("Contents", ()):
                name = item["Key"][len(self._prefix) :]
                if re.fullmatch(r"([0-9a-f]{2})+", name):
                    age_s = _age_s(page, item["LastModified"])
                    yield StoredItem(bytes.fromhex(name), item["Size"], age_s)
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, self._refusals)

    def explain_error(self, error: Exception) -> str:
        text = self._without_secrets(str(error))[:300].rstrip(".") or type(error).__name__
        code = _code(error)
        if code in _LOGINS:
            return f"{text}; check the credentials, and that they may list, get, put and delete in the bucket"
        if code == "NoSuchBucket":
            return f"{text}; make the bucket, or correct its name in the URL"
        if code in _FULL:
            return f"{text}; give the bucket a lifecycle rule, or the server more room"
        return text

    def reset(self) -> None:
        self._http.reset()

    def close(self) -> None:
        self._calls.close()
        self._http.reset()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _get(self, key: bytes) -> Record | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
        except self._refusals as error:
            if _code(error) not in ("NoSuchKey", "404"):
                raise
            return None
        with answer["Body"] as body:
            data = body.read()
        if self._is_expired(_age_s(answer, answer.get("LastModified"))):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))
            return None
        return unpack(data)

    def _head(self, key: bytes) -> dict[str, Any] | None:
        try:
            return self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        except self._refusals as error:
            if _code(error) not in ("NoSuchKey", "404"):
                raise
            return None

    def _age_s(self, key: bytes) -> float | None:
        """Seconds since the value was stored, by the server's clock; None: it is not there, or has expired."""
        answer = self._head(key)
        if answer is None:
            return None
        age_s = _age_s(answer, answer.get("LastModified"))
        return None if self._is_expired(age_s) else age_s

    def _is_expired(self, age_s: float) -> bool:
        return self._ttl_s is not None and age_s >= self._ttl_s

    def _without_secrets(self, text: str) -> str:
        credentials = self._credentials.get_frozen_credentials()
        for secret in (credentials.secret_key, credentials.token, credentials.access_key):
            text = text.replace(secret, "***") if secret else text
        return text


def _parts(url: str) -> tuple[str, str, dict[str, str]]:
    """(bucket, prefix of all names, options)."""
    place, options = take_options(url, ("endpoint", "region", "addressing"))
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if "@" in place or "@" in options.get("endpoint", "") or ":" in bucket:
        raise ArgumentError(
            "expected s3://BUCKET without credentials, got a URL that may have some - in `remote_cache`; boto3 reads "
            "them from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or its files"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+", bucket) or not re.fullmatch(
        r"[A-Za-z0-9._/-]*", prefix
    ):
        raise ArgumentError(
            f"expected s3://BUCKET[/PREFIX] of letters, digits, '.', '-' and '_', got {place!r} - in `remote_cache`"
        )
    addressing = options.get("addressing", "auto")
    if addressing not in ("auto", "path", "virtual"):
        raise ArgumentError(
            f"expected addressing of auto, path or virtual, got {addressing!r} - in `remote_cache`"
        )
    if not re.fullmatch(r"(https?://\S+)?", options.get("endpoint", "")):
        raise ArgumentError(
            "expected an endpoint http://HOST or https://HOST, got another - in `remote_cache`"
        )
    return bucket, (f"{prefix}/" if prefix else "") + _FOLDER, options


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _age_s(answer: dict[str, Any], stored_at: datetime | None) -> float:
    """Both times are the server's; 0.0 if it does not give them."""
    now = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    if now is None or stored_at is None:
        return 0.0
    try:
        return max(0.0, (parsedate_to_datetime(now) - stored_at).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _boto3() -> Any:
    try:
        return import_module("boto3")
    except ImportError:
        raise BackendError(
            'expected boto3 for a remote cache in S3, it is not installed: pip install "quire-kv[s3]"'
        ) from None
