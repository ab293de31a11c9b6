"""`ClusterSettings`: all that a cluster is started with, from JSON: the arguments of `quire.cluster.serve_app:build`.

    {"replicas": 2, "config": "quire.toml", "engine": {"model": "./my-model"}, "server": {"port": 8000}}

`engine` has options of `quire.config.EngineConfig`, `server` settings of `quire serve`'s flags, `config` is its file.
Relative paths count from `folder`. The rest are fields of `ClusterSettings`. Secrets stand in the file, or in variables
that it names, never in the arguments.

An option that several replicas cannot obey is refused by name.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.config import EngineConfig, with_flags
from quire.errors import ArgumentError
from quire.peer_address import PeerAddress
from quire.server.settings import ServerLimits, ServerSettings, load_config

__all__ = ["ClusterSettings", "cluster_help"]

_MAX_REPLICAS = 1024
# Settings of connections, which Ray Serve's proxy has in place of Quire's server.
_OF_CONNECTIONS = (
    "max_connections",
    "max_connections_per_address",
    "max_header_bytes",
    "max_header_seconds",
    "max_body_seconds",
    "max_send_seconds",
)
# Options of an engine that a second one on the machine cannot have too.
_OF_ONE_ENGINE = {
    "kv_events": "all replicas would publish on one port; the door's metrics have the figures of each",
    "kv_events_replay": "all replicas would publish on one port",
    "peer_listen": "all replicas would listen at one address; prefill_replicas has prompts computed apart",
    "profile": "it reports when a command ends, and replicas do not",
}
_SERVER_FLAGS = (
    "host", "port", "served_model_name", "api_key_file", "insecure", "trust_loopback", "allowed_origins",
    "log_requests", "prepare_next_turn", "session_from_user_id", "warm",
)  # fmt: skip


def setting(default: Any, text: str) -> Any:
    """A field with its documentation, which `quire cluster serve --help` shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ClusterSettings:
    """engine, server: of each replica. `cluster_help` has the documentation of the others.

    *raises:* ArgumentError: expected, got, and the setting's name.
    """

    engine: EngineConfig
    server: ServerSettings
    replicas: int = setting(1, "Engines to start. Default: 1.")
    prefill_replicas: int = setting(
        0,
        "Engines that only compute prompts, which the others fetch from their host cache. "
        "Needs decode_replicas and host_cache. Default: 0.",
    )
    decode_replicas: int | None = setting(
        None, "With --prefill-replicas: engines that generate, in place of --replicas."
    )
    prefill_min_tokens: int = setting(
        256,
        "Tokens of a prompt that no engine has, from which on a prefill engine computes it first. Default: 256.",
    )
    min_replicas: int | None = setting(None, "With --max-replicas: the fewest engines. Default: 1.")
    max_replicas: int | None = setting(None, "The most engines; their number then follows the load.")
    cpus: float = setting(
        1.0,
        "CPUs that Ray sets aside for each engine, and its threads unless num_threads says. Default: 1.",
    )
    gpus: float = setting(0.0, "GPUs that Ray sets aside for each engine. Default: 0.")
    target_requests: float = setting(8.0, "Open requests of one engine that autoscaling aims at. Default: 8.")
    target_kv_use: float = setting(
        0.8, "Share of an engine's blocks in use that autoscaling aims at. Default: 0.8."
    )
    scale_up_seconds: float = setting(
        30.0, "Seconds for which more engines must be needed before one starts. Default: 30."
    )
    scale_down_seconds: float = setting(
        600.0, "Seconds for which fewer engines must be enough before one ends. Default: 600."
    )
    digest_seconds: float = setting(
        0.5, "Seconds between two reports of an engine's blocks to the door. Default: 0.5."
    )
    hang_seconds: float = setting(
        30.0,
        "Seconds without a sign of life after which an engine's requests go to another one. Default: 30.",
    )

    def __post_init__(self) -> None:
        for name in ("replicas", "prefill_replicas", "decode_replicas", "min_replicas", "max_replicas"):
            value = getattr(self, name)
            low = int(name != "prefill_replicas")
            if value is not None and (type(value) is not int or not low <= value <= _MAX_REPLICAS):
                raise ArgumentError(
                    f"expected an integer of {low} to {_MAX_REPLICAS}, got {value!r} - in `{name}`"
                )
        for name, is_positive in (
            ("cpus", True),
            ("gpus", False),
            ("target_requests", True),
            ("target_kv_use", True),
            ("scale_up_seconds", False),
            ("scale_down_seconds", False),
            ("digest_seconds", True),
            ("hang_seconds", True),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf or (is_positive and value == 0):
                expected = "a number above 0" if is_positive else "a number, 0 or more"
                raise ArgumentError(f"expected {expected}, got {value!r} - in `{name}`")
        if self.max_replicas is None and self.min_replicas is not None:
            raise ArgumentError(
                f"expected max_replicas with min_replicas, got {self.min_replicas} alone - in `min_replicas`"
            )
        if self.max_replicas is not None and self.replicas != 1:
            raise ArgumentError(
                f"expected replicas or max_replicas, got both, {self.replicas} and {self.max_replicas} - in `replicas`"
            )
        if self.max_replicas is not None and (self.min_replicas or 1) > self.max_replicas:
            raise ArgumentError(
                f"expected at most max_replicas {self.max_replicas}, got {self.min_replicas} - in `min_replicas`"
            )
        if self.target_kv_use > 1:
            raise ArgumentError(
                f"expected a share of at most 1, got {self.target_kv_use!r} - in `target_kv_use`"
            )
        self._check_prefills()
        for name, reason in _OF_ONE_ENGINE.items():
            default = EngineConfig.__dataclass_fields__[name].default
            if (given := getattr(self.engine, name)) != default:
                raise ArgumentError(f"expected no {name} for replicas, got {given!r}: {reason} - in `{name}`")
        for name in _OF_CONNECTIONS:
            if (given := getattr(self.server.limits, name)) != getattr(ServerLimits(), name):
                raise ArgumentError(
                    f"expected no {name} for replicas, got {given}: Ray Serve's proxy accepts the connections; put a "
                    f"proxy with that limit before it - in `{name}`"
                )

    def _check_prefills(self) -> None:
        if type(self.prefill_min_tokens) is not int or self.prefill_min_tokens < 1:
            raise ArgumentError(
                f"expected an integer of 1 or more, got {self.prefill_min_tokens!r} - in `prefill_min_tokens`"
            )
        if not self.prefill_replicas:
            if self.decode_replicas is not None:
                raise ArgumentError(
                    f"expected prefill_replicas with decode_replicas {self.decode_replicas}, got 0; without them give "
                    "replicas - in `decode_replicas`"
                )
            return
        if self.decode_replicas is None or self.max_replicas is not None or self.replicas != 1:
            raise ArgumentError(
                f"expected decode_replicas with prefill_replicas {self.prefill_replicas}, and neither replicas nor "
                f"max_replicas, got {self.decode_replicas}, {self.replicas} and {self.max_replicas} - in "
                "`decode_replicas`"
            )
        if self.engine.host_cache is None:
            raise ArgumentError(
                "expected host_cache with prefill_replicas, got none: the prompts that they compute are fetched from "
                "there; give --host-cache SIZE - in `host_cache`"
            )
        if self.engine.peers is not None:
            raise ArgumentError(
                f"expected no peers with prefill_replicas, got {self.engine.peers!r}: the cluster sets them - "
                "in `peers`"
            )

    @classmethod
    def from_arguments(
        cls, arguments: Mapping[str, Any], tenant_secret: bytes | None = None
    ) -> ClusterSettings:
        """Reads arguments. tenant_secret: of a cluster whose file has none."""
        own = {entry.name for entry in fields(cls)} - {"engine", "server"}
        known = {*own, "engine", "server", "config", "folder"}
        if unknown := sorted(arguments.keys() - known):
            raise ArgumentError(
                f"expected only {', '.join(sorted(known))}, got {', '.join(unknown)} - in the cluster's arguments"
            )
        flags = dict(arguments.get("server") or {})
        if unknown := sorted(flags.keys() - set(_SERVER_FLAGS)):
            raise ArgumentError(
                f"expected only {', '.join(sorted(_SERVER_FLAGS))}, got {', '.join(unknown)} - in `server`; others "
                "stand in the file that `config` names"
            )
        server, table = load_config(arguments.get("config"), flags)
        if server.tenant_secret is None and tenant_secret is not None:
            server = replace(server, tenant_secret=tenant_secret)
        options = with_flags(table, dict(arguments.get("engine") or {}))
        secrets = [name for name, option in EngineConfig.options().items() if option.is_secret]
        if unknown := sorted(options.keys() - EngineConfig.options().keys() | options.keys() & set(secrets)):
            raise ArgumentError(f"expected options of an engine, got {', '.join(unknown)} - in `engine`")
        engine = EngineConfig(
            **options, tenant_secret=server.tenant_secret, remote_secret=server.remote_secret
        )
        return cls(
            engine=engine,
            server=server,
            **{name: arguments[name] for name in sorted(own & arguments.keys())},
        )

    @property
    def num_engines(self) -> int:
        """Engines that answer, where their number does not follow the load."""
        return self.replicas if self.decode_replicas is None else self.decode_replicas

    @property
    def most_replicas(self) -> int:
        """The most engines that it can come to, with those for prompts."""
        return self.prefill_replicas + (self.num_engines if self.max_replicas is None else self.max_replicas)

    def config_of_engine(self, secret: bytes) -> EngineConfig:
        """The options of an engine that answers: with prefill replicas it fetches prompts from those that requests
        name. secret: of the cluster."""
        return (
            replace(self.engine, peer_secret=_peer_secret(secret)) if self.prefill_replicas else self.engine
        )

    def config_of_prefill(self, secret: bytes, host: str) -> EngineConfig:
        """The options of a prefill replica. It gives prefixes at a free port of `host`, an address of its machine, to
        engines that have the cluster's secret."""
        address = str(PeerAddress(host, 0))
        return replace(
            self.engine, cache_write="through", peer_listen=address, peer_secret=_peer_secret(secret)
        )


def _peer_secret(secret: bytes) -> bytes:
    """Of the peers of a cluster: another one than that of its tenants."""
    return hmac.digest(secret, b"quire cluster peers", "sha256")


def cluster_help() -> dict[str, str]:
    """The documentation of each setting of a cluster, by name, in their order."""
    return {
        entry.name: entry.metadata["help"] for entry in fields(ClusterSettings) if "help" in entry.metadata
    }
