"""Starts, inspects and stops a cluster on Ray Serve: what `quire cluster` does, and the YAML of `serve deploy`.

Needs ray[serve] (`quire-kv[cluster]`), except `deploy_yaml`.

Cost: a start of Ray, 10 to 20 s, then that of the engines.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quire.cluster.cluster_settings import ClusterSettings
from quire.errors import ArgumentError, BackendError, QuireError

__all__ = ["APPLICATION", "ClusterStatus", "cluster_status", "deploy_yaml", "run_cluster", "stop_cluster"]

APPLICATION = "quire"
_OBJECT_STORE_BYTES = 128 << 20  # answers in parts; no tensors go through it
_POLL_S = 1.0
_OWN_ERROR = re.compile(r"quire\.errors\.\w+: (.+)")  # in a traceback
_GRACE_S = 2.0  # in which `stop_cluster` of another process sees that the application has gone
_CONNECT_TRIES = 3  # a busy machine's Ray does not answer in time now and then
_START_TRIES = 2  # Ray gives its node 30 s, which a busy machine exceeds now and then


@dataclass(frozen=True)
class ClusterStatus:
    """status: Serve's word for the application; "NOT_RUNNING" without one. message: the reason, if there is one.
    replicas: the number by state, of each deployment."""

    status: str
    message: str
    replicas: Mapping[str, Mapping[str, int]]


def run_cluster(
    arguments: Mapping[str, Any], address: str | None, when_ready: Callable[[ClusterSettings, str], None]
) -> None:
    """Starts the cluster and waits until a signal, or `stop_cluster` of another process, ends it.

    arguments: of `quire.cluster.serve_app:build`. address: of a Ray cluster; None starts one on this machine, which
    ends with the call. when_ready: called with the settings and the door's URL. *changes:* the handlers of SIGTERM and
    SIGINT. *raises:* ArgumentError, QuireError.
    """
    settings = ClusterSettings.from_arguments(arguments)
    host, port = settings.server.host, settings.server.port
    if port == 0:
        raise ArgumentError("expected a port, got 0: Ray Serve needs to know it - in `port`")
    ray, serve = _ray()
    if address is None:
        _require_free(host, port)
        _start_ray(ray, settings)
    else:
        _connect(ray, address, log_to_driver=settings.server.log_requests)
    is_stopping = threading.Event()
    try:
        from quire.cluster.serve_app import build

        serve.start(http_options={"host": host, "port": port})
        with _reason_of_start(serve):
            serve.run(build(dict(arguments)), name=APPLICATION, route_prefix="/", blocking=False)
        url = _url(host, port)
        _require_answer(url)
        for number in (signal.SIGTERM, signal.SIGINT):  # a start is interrupted as any command
            signal.signal(number, lambda *_: is_stopping.set())
        when_ready(settings, url)
        while not is_stopping.wait(_POLL_S) and APPLICATION in serve.status().applications:
            pass
        if is_stopping.is_set():
            serve.delete(APPLICATION)
        else:
            time.sleep(_GRACE_S)
    except BaseException:
        if address is not None:  # else it ends with Ray
            with suppress(Exception):
                serve.delete(APPLICATION)
        raise
    finally:
        ray.shutdown()  # ends Ray and Serve too, if this process started them


def cluster_status(address: str | None) -> ClusterStatus:
    """The state of the cluster at a Ray address; None: the one that runs on this machine. *raises:* ArgumentError: no
    Ray runs there."""
    with _connected(address) as serve:
        application = serve.status().applications.get(APPLICATION)
        if application is None:
            return ClusterStatus("NOT_RUNNING", "", {})
        replicas = {
            name: {_word(state): count for state, count in deployment.replica_states.items()}
            for name, deployment in application.deployments.items()
        }
        return ClusterStatus(_word(application.status), application.message, replicas)


def stop_cluster(address: str | None) -> bool:
    """Ends the cluster once its requests have ended or `drain_seconds` are over; False: there was none."""
    with _connected(address) as serve:
        if APPLICATION not in serve.status().applications:
            return False
        from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

        with suppress(RayActorError):  # the process of `run_cluster` was first, and has ended Serve
            serve.delete(APPLICATION)
        return True


def deploy_yaml(arguments: Mapping[str, Any]) -> str:
    """A file for `serve deploy`. *raises:* ArgumentError: as `ClusterSettings.from_arguments`."""
    import yaml

    settings = ClusterSettings.from_arguments(arguments)
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "quire.cluster.serve_app:build",
        "args": dict(arguments),
    }
    document = {
        "http_options": {"host": settings.server.host, "port": settings.server.port},
        "applications": [application],
    }
    return yaml.safe_dump(document, sort_keys=False)


def _ray() -> tuple[Any, Any]:
    """The modules ray and ray.serve."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BackendError(
            f"expected Ray Serve for a cluster, got {error}; pip install 'quire-kv[cluster]'"
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return ray, serve


def _start_ray(ray: Any, settings: ClusterSettings) -> None:
    """Starts Ray on this machine, with as many CPUs as the engines ask for."""
    num_cpus = max(os.cpu_count() or 1, math.ceil(settings.most_replicas * settings.cpus))
    for tries_left in reversed(range(_START_TRIES)):
        try:
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=settings.server.log_requests,
                logging_level="ERROR",
            )
            return
        except Exception as error:
            ray.shutdown()
            if not tries_left:
                raise QuireError(f"Ray did not start on this machine: {error}") from error


def _connect(ray: Any, address: str, *, log_to_driver: bool = False) -> None:
    for tries_left in reversed(range(_CONNECT_TRIES)):
        try:
            ray.init(address=address, log_to_driver=log_to_driver, logging_level="ERROR")
            return
        except ConnectionError as error:
            ray.shutdown()
            if not tries_left:
                raise ArgumentError(
                    f"expected the address of a running Ray cluster, got {address!r} ({error}): start one with "
                    "`ray start --head` or `quire cluster serve` - in `address`"
                ) from error
            time.sleep(_POLL_S)


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """ray.serve, connected to a running cluster."""
    ray, serve = _ray()
    _connect(ray, address or "auto")
    try:
        yield serve
    finally:
        ray.shutdown()


@contextmanager
def _reason_of_start(serve: Any) -> Iterator[None]:
    """*raises:* QuireError: a replica did not start, with the reason that its process gave."""
    try:
        yield
    except RuntimeError as error:
        found = serve.status().applications.get(APPLICATION)
        messages = [] if found is None else [entry.message for entry in found.deployments.values()]
        own = _OWN_ERROR.search("\n".join(messages))
        raise QuireError(f"the replicas did not start: {own[1] if own else error}") from error


def _require_free(host: str, port: int) -> None:
    """*raises:* ArgumentError: the port is taken. Serve's proxy would try again and again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ArgumentError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; give another --host or --port"
            ) from error


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _require_answer(url: str) -> None:
    """*raises:* QuireError: the door does not answer there."""
    reachable = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    until, reason = time.monotonic() + 30, ""
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{reachable}/health", timeout=10):
                return
        except OSError as error:
            reason = str(error)
            time.sleep(0.2)
    raise QuireError(
        f"the door does not answer on {url}: {reason}; if Serve runs on this cluster already, its first start chose "
        "host and port: give the same, or end it with `serve shutdown`"
    )


def _word(state: Any) -> str:
    return str(getattr(state, "value", state))
