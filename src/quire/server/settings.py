"""Settings of a server: flags and a TOML file, checked before a model is loaded. Flags win over the file.

    [model]                    # any option of quire.config.EngineConfig
    model = "./my-model"
    kv_memory = "4GiB"
    storage = "paged:32"

    [server]
    port = 8000
    max_waiting = 512
    admin_key = "env:QUIRE_ADMIN_KEY"

    [[tenants]]
    name = "alice"
    keys = ["env:ALICE_KEY", "sha256:9f86d0..."]   # a key in the clear is accepted too
    priority = 0
    quota = "1GiB"
    floor = "128MiB"
    max_requests = 64
    requests_per_minute = 600

Tenants' namespaces are derived from `tenant_secret` of [server], at least 16 bytes: with the same secret, tenants
find their content in a disk cache after a restart. `remote_secret`, as long, signs the values of `remote_cache`. Both
may be "env:NAME".

A file with an unknown name is refused: a misspelt limit would limit nothing.
"""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from quire.config import EngineConfig, check_secret
from quire.errors import ArgumentError
from quire.secret_text import check_key, is_readable_by_all, key_lines, read_text, resolve_secret
from quire.server.api_keys import ADMIN, ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.http.client_address import TrustedProxies
from quire.sizes import parse_size

__all__ = ["ServerLimits", "ServerSettings", "StoredAs", "is_loopback", "load_config", "load_stored_as"]


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one request, and of all together.

    max_waiting: requests that wait for the engine; a further one gets 429. requests_per_minute_per_address: of one
    client address without a tenant name; None for no limit. max_body_bytes: of a request. max_body_values: of its
    JSON, see `bodies.weight_of`. max_bodies_bytes: of all large bodies in progress.

    max_body_seconds, max_header_bytes, max_header_seconds: of a request's arrival. max_send_seconds: longest wait for
    a client to read on. max_connections: open at once; max_connections_per_address: of one client address.

    The others are counts within one request. max_prompts: a prompt counts `n` times if there are several.
    max_template_seconds: time of the model's chat template. max_schema_depth: nested objects and arrays of a JSON
    schema. max_kept: prompts of one tenant that `keep_for` pins at once. max_conversations, max_conversation_bytes:
    of one tenant, and the memory of all its conversations. max_snapshots, max_snapshot_bytes: of one tenant, and the
    disk of all its snapshots, keys and values included; None for half of the disk cache.
    """

    max_waiting: int = 512
    requests_per_minute_per_address: int | None = None
    max_body_bytes: int = 16 << 20
    max_body_values: int = 1 << 19
    max_bodies_bytes: int = 256 << 20
    max_body_seconds: int = 60
    max_header_bytes: int = 64 << 10
    max_header_seconds: int = 10
    max_send_seconds: int = 60
    max_connections: int = 4096
    max_connections_per_address: int = 1024
    max_prompts: int = 64
    max_n: int = 16
    max_stop: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_regex_chars: int = 16 << 10
    max_logprobs: int = 20
    max_messages: int = 4096
    max_template_seconds: int = 5
    max_tools: int = 128
    max_schema_depth: int = 32
    max_schema_bytes: int = 256 << 10
    max_kept: int = 256
    max_conversations: int = 256
    max_conversation_bytes: int = 64 << 20
    max_snapshots: int = 256
    max_snapshot_bytes: int | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None or entry.default is not None:
                _check(entry.name, value)


@dataclass(frozen=True)
class ServerSettings:
    """See the module's docstring. host: an IPv6 address with or without brackets. insecure: accepts other machines
    without keys.

    keys, tenants: of the file and of --api-key-file. trust_loopback: without any keys, clients on this machine are
    the administrator. allowed_origins: sites whose pages may use the API, such as "https://app.example".
    trusted_proxies: addresses and networks of proxies whose X-Forwarded-For names the client. warnings: lines to
    print at the start.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    insecure: bool = False
    trust_loopback: bool = True
    allowed_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    log_requests: bool = False
    drain_seconds: float = 30.0
    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: KeyRing = field(default_factory=KeyRing)
    tenants: tuple[ApiTenant, ...] = (ANYBODY,)
    tenant_secret: bytes | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()
    remote_secret: bytes | None = field(default=None, repr=False)

    @cached_property
    def proxies(self) -> TrustedProxies:
        return TrustedProxies(self.trusted_proxies)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _SERVER_FIELDS and (value is not None or entry.default is not None):
                _check(entry.name, value)
        object.__setattr__(self, "host", self.host.removeprefix("[").removesuffix("]"))
        for name in _LISTS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _ = self.proxies  # reports a wrong address now
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ArgumentError(
                    "expected an origin as a browser sends it, such as https://app.example or http://localhost:3000 "
                    f"(lower case, no path, no *), got {origin!r} - in `allowed_origins`"
                )
        if not self.is_loopback and self.keys.is_empty and not self.insecure:
            raise ArgumentError(
                f"expected API keys for a server that other machines can reach, got none with host {self.host!r}; give "
                "--api-key-file or [[tenants]] in --config, listen on 127.0.0.1, or say --insecure"
            )

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or an address, without brackets, is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# A scheme and a host, with a port unless it is the scheme's default. Browser extensions and desktop programs have
# schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@\[\]:*A-Z]+)(:[0-9]+)?")

_SERVER_FIELDS = {
    "host": str,
    "port": int,
    "served_model_name": str,
    "insecure": bool,
    "trust_loopback": bool,
    "allowed_origins": (list, tuple),
    "trusted_proxies": (list, tuple),
    "log_requests": bool,
    "drain_seconds": (int, float),
}
_LISTS = ("allowed_origins", "trusted_proxies")
# Read from the file (and --api-key-file) only; the settings hold the keys and secrets themselves.
_KEYS_AND_SECRETS = ("api_key_file", "admin_key", "tenant_secret", "remote_secret")
_LIMITS = tuple(entry.name for entry in fields(ServerLimits))
_TENANT_FIELDS = {
    "name": str,
    "keys": list,
    "priority": int,
    "quota": (int, str),
    "floor": (int, str),
    "max_requests": int,
    "requests_per_minute": int,
}


def load_config(path: str | None, flags: Mapping[str, Any]) -> tuple[ServerSettings, dict[str, Any]]:
    """The settings, and the [model] table, of a file and of flags (None: not given).

    *raises:* ArgumentError naming file and field.
    """
    document = _read_toml(path) if path is not None else {}
    _check_names(document, {"model", "server", "tenants"}, f"{path}")
    server = _table(document, "server", path)
    _check_names(server, {*_SERVER_FIELDS, *_KEYS_AND_SECRETS, *_LIMITS}, f"[server] of {path}")
    for name, value in server.items():
        _check(name, value, f"{name} in [server] of {path}")
    server = {**server, **{name: value for name, value in flags.items() if value is not None}}

    tenants = [_tenant(entry, path) for entry in document.get("tenants", [])]
    warnings = []
    if path is not None and is_readable_by_all(path) and _has_secrets(document):
        warnings.append(_readable_warning(path))
    if (key_file := server.get("api_key_file")) is not None and is_readable_by_all(key_file):
        warnings.append(_readable_warning(key_file))
    keys = [pair for _, pairs in tenants for pair in pairs]
    if (key_file := server.pop("api_key_file", None)) is not None:
        keys += [(digest_of_key(key), ANYBODY) for key in key_lines(key_file)]
    if (admin_key := server.pop("admin_key", None)) is not None:
        keys.append((_digest(admin_key, "admin_key"), ADMIN))
    for name in ("tenant_secret", "remote_secret"):
        if (secret := _secret(name, server.pop(name, None), path)) is not None:
            server[name] = secret
    names = [tenant.name for tenant, _ in tenants]
    if len(set(names)) != len(names):
        raise ArgumentError(f"expected every tenant once, got {names} - in [[tenants]] of {path}")
    if ANYBODY.name in names or ADMIN.name in names:
        raise ArgumentError(
            f"expected other names than {ANYBODY.name} and {ADMIN.name} - in [[tenants]] of {path}"
        )
    settings = ServerSettings(
        limits=ServerLimits(**{name: server.pop(name) for name in _LIMITS if name in server}),
        keys=KeyRing(keys),
        tenants=(ANYBODY, *(tenant for tenant, _ in tenants)),
        warnings=tuple(warnings),
        **server,
    )
    return settings, _model_table(document, path)


def _readable_warning(path: str) -> str:
    return f"every user of this machine can read {path}, which has secrets in it; chmod o-r {path}"


def _has_secrets(document: Mapping[str, Any]) -> bool:
    """Whether a file, whose [server] and [[tenants]] have been checked, has a secret in the clear."""
    server, model = document.get("server", {}), document.get("model")
    values = [server.get(name) for name in ("admin_key", "tenant_secret", "remote_secret")]
    for entry in document.get("tenants", []):
        values += entry["keys"]
    url = model.get("remote_cache") if isinstance(model, dict) else None
    values.append(url if isinstance(url, str) and ("@" in url or "password=" in url) else None)
    return any(isinstance(text, str) and text.partition(":")[0] not in ("env", "sha256") for text in values)


@dataclass(frozen=True)
class StoredAs:
    """The settings that decide a server's stored names and formats: [model], secrets, tenants."""

    model: dict[str, Any]
    tenant_secret: bytes | None = field(repr=False)
    remote_secret: bytes | None = field(repr=False)
    tenants: tuple[str, ...]


def load_stored_as(path: str) -> StoredAs:
    """Reads a server's file for a command that opens its disk cache; API keys are not read.

    *raises:* ArgumentError naming file and field.
    """
    document = _read_toml(path)
    _check_names(document, {"model", "server", "tenants"}, path)
    server = _table(document, "server", path)
    tenant_secret, remote_secret = (
        _secret(name, server.get(name), path) for name in ("tenant_secret", "remote_secret")
    )
    names = []
    for entry in document.get("tenants", []):
        _check_type(entry, dict, f"[[tenants]] of {path}")
        _check_type(entry.get("name"), str, f"name in [[tenants]] of {path}")
        names.append(entry["name"])
    return StoredAs(_model_table(document, path), tenant_secret, remote_secret, tuple(names))


def _secret(name: str, text: Any, path: str | None) -> bytes | None:
    """`tenant_secret` or `remote_secret` of a file."""
    if text is None:
        return None
    where = f"{name} in [server] of {path}"
    _check_type(text, str, where)
    secret = resolve_secret(text, where).encode()
    check_secret(secret, name)
    return secret


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"expected a readable TOML file, got {path}: {error} - in --config") from error


def _tenant(entry: Any, path: str | None) -> tuple[ApiTenant, list[tuple[bytes, ApiTenant]]]:
    where = f"[[tenants]] of {path}"
    _check_type(entry, dict, where)
    _check_names(entry, _TENANT_FIELDS.keys(), where)
    for name, value in entry.items():
        _check_type(value, _TENANT_FIELDS[name], f"{name} in {where}")
    if not entry.get("name") or not entry.get("keys"):
        raise ArgumentError(f"expected a name and keys, got {sorted(entry)} - in {where}")
    for name in ("priority", "max_requests", "requests_per_minute"):
        if entry.get(name, 1) < (0 if name == "priority" else 1):
            raise ArgumentError(f"expected a positive number, got {entry[name]} - as {name} in {where}")
    quota = entry.get("quota")
    tenant = ApiTenant(
        entry["name"],
        priority=entry.get("priority", 0),
        quota_bytes=None if quota is None else parse_size(quota, where=f"quota in {where}"),
        floor_bytes=parse_size(entry["floor"], where=f"floor in {where}") if "floor" in entry else 0,
        max_requests=entry.get("max_requests"),
        requests_per_minute=entry.get("requests_per_minute"),
    )
    return tenant, [(_digest(key, f"keys of {tenant.name} in {where}"), tenant) for key in entry["keys"]]


def _digest(key: Any, where: str) -> bytes:
    """The digest of a key in a file: in the clear, `env:NAME` or `sha256:HEX`. Errors never show the key."""
    _check_type(key, str, where)
    kind, _, rest = key.partition(":")
    if kind == "env":
        return digest_of_key(check_key(resolve_secret(key, where), where))
    if kind == "sha256":
        try:
            digest = bytes.fromhex(rest.strip())
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise ArgumentError(f"expected 64 hexadecimal digits after sha256: - in {where}")
        return digest
    return digest_of_key(check_key(key, where))


def _table(document: Mapping[str, Any], name: str, path: str | None) -> dict[str, Any]:
    table = document.get(name, {})
    _check_type(table, dict, f"[{name}] of {path}")
    return dict(table)


def _model_table(document: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """Options of `EngineConfig`, their values unchecked: flags may override them. Secrets belong to [server]."""
    table = _table(document, "model", path)
    options = EngineConfig.options()
    _check_names(table, [name for name in options if not options[name].is_secret], f"[model] of {path}")
    return table


def _check_names(table: Mapping[str, Any], known: Any, where: str) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise ArgumentError(
            f"expected only {', '.join(sorted(known))}, got {', '.join(unknown)} - in {where}"
        )


def _check(name: str, value: Any, where: str | None = None) -> None:
    """Checks a setting of the server from any source. *raises:* ArgumentError."""
    where = where or f"`{name}`"
    if name in _LIMITS:
        _check_type(value, int, where)
        if value < 1:
            raise ArgumentError(f"expected 1 or more, got {value} - as {where}")
        return
    if name == "port":
        if type(value) is not int or not 0 <= value <= 65535:
            raise ArgumentError(f"expected a port of 0 to 65535, got {value!r} - as {where}")
        return
    _check_type(value, _SERVER_FIELDS.get(name, str), where)
    if name == "drain_seconds" and not 0 <= value < math.inf:
        raise ArgumentError(f"expected seconds, 0 or more, got {value} - as {where}")
    for entry in value if name in _LISTS else ():
        _check_type(entry, str, where)


def _check_type(value: Any, kind: Any, where: str) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ArgumentError(f"expected {names}, got {type(value).__name__} - as {where}")
