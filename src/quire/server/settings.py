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
    weight = 2
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

from quire.config import EngineConfig, check_secret, check_weight
from quire.errors import ArgumentError
from quire.secret_text import check_key, is_readable_by_all, key_lines, read_text, resolve_secret
from quire.server.api_keys import ADMIN, ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.http.client_address import TrustedProxies
from quire.sizes import parse_size

__all__ = [
    "KEYS_AND_SECRETS",
    "TENANT_HELP",
    "ServerLimits",
    "ServerSettings",
    "StoredAs",
    "is_loopback",
    "load_config",
    "load_stored_as",
    "setting_help",
]


def setting(default: Any, text: str) -> Any:
    """A field with its documentation. text: shown by `quire serve --help` and in docs/options.md."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one request, and of all together. `setting_help` has the documentation of each."""

    max_waiting: int = setting(512, "Requests that wait for the engine; one more gets 429.")
    requests_per_minute_per_address: int | None = setting(
        None,
        "Requests of a minute from one client address without a tenant's key; more get 429. Default: no "
        "limit.",
    )
    max_body_bytes: int = setting(
        16 << 20,
        "Bytes of a request's body, before and after it is unpacked; a larger one gets 413.",
    )
    max_body_values: int = setting(
        1 << 19,
        "Values of a body's JSON: an array or object counts as 8, a name in an object as 16; more get 400.",
    )
    max_bodies_bytes: int = setting(
        256 << 20,
        "Bytes of all bodies above 64 KiB that are read at the same time, together; one more gets 429.",
    )
    max_body_seconds: int = setting(60, "Seconds in which a body has to arrive; a later one gets 408.")
    max_header_bytes: int = setting(
        64 << 10,
        "Bytes of a request's headers; larger ones get 431, or 414 if the address is too long.",
    )
    max_header_seconds: int = setting(10, "Seconds in which the headers have to arrive; later ones get 408.")
    max_send_seconds: int = setting(
        60,
        "Seconds for which a client may read nothing of its answer; then its connection is closed.",
    )
    max_connections: int = setting(
        4096,
        "Connections that are open at the same time, up to the hard limit of open files.",
    )
    max_connections_per_address: int = setting(
        1024,
        "Connections of one client address; trusted proxies have no such limit.",
    )
    max_prompts: int = setting(64, "Prompts of one completion; if there are several, each counts `n` times.")
    max_n: int = setting(16, "Answers to one prompt (`n`).")
    max_stop: int = setting(16, "Stop strings of a request.")
    max_stop_chars: int = setting(256, "Characters of a stop string.")
    max_stop_token_ids: int = setting(256, "Stop tokens of a request.")
    max_logit_bias: int = setting(1024, "Tokens with a `logit_bias` in a request.")
    max_regex_chars: int = setting(16 << 10, "Characters of a regular expression.")
    max_logprobs: int = setting(20, "Alternatives in `top_logprobs`.")
    max_prompt_logprobs: int = setting(
        1 << 20,
        "Log probabilities of prompts in one answer: tokens of all prompts, times alternatives and one, times `n`.",
    )
    max_messages: int = setting(4096, "Messages of a chat.")
    max_template_seconds: int = setting(
        5,
        "Seconds that the model's chat template may take; a longer one gets 400.",
    )
    max_tools: int = setting(128, "Tools of a chat.")
    max_schema_depth: int = setting(32, "Nested objects and arrays of a JSON schema.")
    max_schema_bytes: int = setting(256 << 10, "Bytes of a JSON schema.")
    max_kept: int = setting(256, "Prompts of one tenant that `keep_for` pins at the same time.")
    max_conversations: int = setting(256, "Conversations of one tenant.")
    max_conversation_bytes: int = setting(64 << 20, "Memory of all conversations of one tenant, in bytes.")
    max_records: int = setting(
        4096,
        "Stored responses and OpenAI conversations of one tenant; beyond it, those used least recently go.",
    )
    max_record_bytes: int = setting(64 << 20, "Bytes of all these of one tenant, in memory or on disk.")
    max_snapshots: int = setting(256, "Snapshots of one tenant; one more gets 429.")
    max_snapshot_bytes: int | None = setting(
        None,
        "Disk of all snapshots of one tenant, their keys and values included, in bytes. Default: half of the "
        "disk cache.",
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None or entry.default is not None:
                _check(entry.name, value)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server: the keys of [server] in its file. `setting_help` has the documentation of each.

    keys, tenants: of the file and of --api-key-file. warnings: lines to print at the start.

    *raises:* ArgumentError: expected, got, and the setting's name.
    """

    host: str = setting(
        "127.0.0.1",
        "Address to listen on, IPv6 with or without brackets; any but this machine's own needs keys, or "
        "`insecure`. Default: 127.0.0.1.",
    )
    port: int = setting(8000, "Port to listen on; 0 is any free one. Default: 8000.")
    served_model_name: str | None = setting(
        None,
        "Name of the model in the API. Default: that of its folder or file.",
    )
    insecure: bool = setting(False, "Accept clients of other machines without keys. Default: off.")
    trust_loopback: bool = setting(
        True,
        "Without any keys, clients on this machine are the administrator; turn it off behind a proxy. "
        "Default: on.",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Sites whose pages may use the API, such as https://app.example. Default: none.",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        "Addresses and networks of proxies whose X-Forwarded-For names the client. Default: none.",
    )
    log_requests: bool = setting(
        False,
        "Write a line for each request to stderr, without its content. Default: off.",
    )
    drain_seconds: float = setting(
        30.0,
        "Seconds in which running requests may finish after SIGTERM. Default: 30.",
    )
    prepare_next_turn: int = setting(
        4096,
        "Tokens of a session's next prompt that are computed ahead while the engine is idle; 0: none. Default: 4096.",
    )
    session_from_user_id: bool = setting(
        False,
        "On /v1/messages, take metadata.user_id as the session's name if nothing else names it. Default: off.",
    )
    warm: str | None = setting(
        None,
        "File of prompts that are computed at the start: the body of a chat or a completion a line. Default: none.",
    )
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
        """Whether `host` is reachable from this machine only."""
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
    "prepare_next_turn": int,
    "session_from_user_id": bool,
    "warm": str,
}
_LISTS = ("allowed_origins", "trusted_proxies")
# Read from the file (and --api-key-file) only, with their documentation; the settings hold the keys and secrets.
KEYS_AND_SECRETS = {
    "api_key_file": "File of accepted API keys, one a line, all of one tenant. Default: none.",
    "admin_key": "Key of the administrator: in the clear, env:NAME (a variable) or sha256:HEX. Default: none.",
    "tenant_secret": "Secret, at least 16 bytes or env:NAME, from which tenants' namespaces are made; with the same "
    "one a tenant finds its content in the tiers after a restart. Default: a new one in each process.",
    "remote_secret": "Secret, at least 16 bytes or env:NAME, with which engines sign the values of `remote_cache`. "
    "Default: none.",
}
_LIMITS = tuple(entry.name for entry in fields(ServerLimits))
_TENANT_FIELDS = {
    "name": str,
    "keys": list,
    "priority": int,
    "weight": (int, float),
    "quota": (int, str),
    "floor": (int, str),
    "max_requests": int,
    "requests_per_minute": int,
}
TENANT_HELP = {
    "name": "Name of the tenant, in logs, metrics and for its namespace. Required.",
    "keys": "API keys of the tenant: each in the clear, env:NAME (a variable) or sha256:HEX. Required.",
    "priority": "Added to the priority of its requests; smaller is served first. Default: 0.",
    "weight": "Its share of the computed tokens while tenants wait, next to the others' weights. Default: 1.",
    "quota": "The most KV memory of its content, cached content included. Default: no limit.",
    "floor": "KV memory that no other tenant can take. Default: 0.",
    "max_requests": "Its requests that run or wait; one more gets 429. Default: a share of the places.",
    "requests_per_minute": "Its requests of a minute; more get 429. Default: no limit.",
}


def setting_help() -> dict[str, str]:
    """The documentation of each setting and limit of a server, by name, in their order."""
    described = (entry for owner in (ServerSettings, ServerLimits) for entry in fields(owner))
    return {entry.name: entry.metadata["help"] for entry in described if "help" in entry.metadata}


def load_config(path: str | None, flags: Mapping[str, Any]) -> tuple[ServerSettings, dict[str, Any]]:
    """The settings, and the [model] table, of a file and of flags (None: not given).

    *raises:* ArgumentError naming file and field.
    """
    document = _read_toml(path) if path is not None else {}
    _check_names(document, {"model", "server", "tenants"}, f"{path}")
    server = _table(document, "server", path)
    _check_names(server, {*_SERVER_FIELDS, *KEYS_AND_SECRETS, *_LIMITS}, f"[server] of {path}")
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
    weight = entry.get("weight", 1)
    check_weight(weight, f"as weight in {where}")
    tenant = ApiTenant(
        entry["name"],
        weight=float(weight),
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
    if name == "prepare_next_turn" and value < 0:
        raise ArgumentError(f"expected tokens, 0 or more, got {value} - as {where}")
    for entry in value if name in _LISTS else ():
        _check_type(entry, str, where)


def _check_type(value: Any, kind: Any, where: str) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ArgumentError(f"expected {names}, got {type(value).__name__} - as {where}")
