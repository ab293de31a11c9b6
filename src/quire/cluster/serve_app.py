"""A cluster as an application of Ray Serve: engines as replicas, and one door before them.

`build` is what the YAML of `serve deploy` names: `import_path: quire.cluster.serve_app:build`, with the arguments of
`ClusterSettings.from_arguments`.

    client -> Serve's HTTP proxy -> DoorDeployment -> EngineDeployment, one of several
                                                   -> EngineDeployment "prefill", before a long prompt

Needs ray[serve] (`quire-kv[cluster]`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import ReplicaUnavailableError  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import Response

from quire.cluster.cluster_settings import ClusterSettings
from quire.cluster.door import Door
from quire.cluster.prefills import HANG_S, Prefills
from quire.cluster.prompt_keys import PromptKeys
from quire.cluster.replica_group import ReplicaGroup, ReplicaLostError, Send
from quire.cluster.replica_server import AnswerPart, CarriedRequest, ReplicaServer
from quire.cluster.route_table import ENGINES, PREFILLS
from quire.weights.load import load_tokenizer

__all__ = ["DoorDeployment", "EngineDeployment", "build"]

_MAX_OPEN = 1 << 16  # requests at the door; each engine bounds its own by `max_waiting`
_LOGGING = {"enable_access_log": False}  # `log_requests` writes Quire's own lines
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 30.0


def _settings_of(arguments: Mapping[str, Any], secret: bytes) -> ClusterSettings:
    """The settings, read in a process of Ray: relative paths count from the folder of `quire cluster`."""
    if (folder := arguments.get("folder")) is not None and os.path.isdir(folder):
        os.chdir(folder)
    return ClusterSettings.from_arguments(arguments, secret)


class EngineDeployment:
    """A replica. arguments: of `build`. secret: the tenants', where the file has none. is_prefill: it only computes
    prompts."""

    async def __init__(  # pyright: ignore[reportGeneralTypeIssues]
        self, arguments: Mapping[str, Any], secret: bytes, is_prefill: bool = False
    ) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        settings = _settings_of(arguments, secret)
        config = settings.config_of_engine(secret)
        if is_prefill:
            config = settings.config_of_prefill(secret, ray.util.get_node_ip_address())
        self._server = ReplicaServer(settings, name, config)
        self._server.begin_warming()

    async def answer(self, request: CarriedRequest, ticket: int) -> AsyncGenerator[AnswerPart, None]:
        """ticket: for the router, which reads it before the call."""
        async for part in self._server.answer(request):
            yield part

    def record_routing_stats(self) -> dict[str, Any]:
        return self._server.routing_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"kv_load": await self._server.kv_load()}

    def check_health(self) -> None:
        self._server.require_health()

    def __del__(self) -> None:
        if (server := getattr(self, "_server", None)) is not None:
            server.close()


class DoorDeployment:
    """The door. engines, prefills: the handles of the replicas."""

    def __init__(
        self,
        engines: DeploymentHandle,
        arguments: Mapping[str, Any],
        secret: bytes,
        prefills: DeploymentHandle | None = None,
    ) -> None:
        settings = _settings_of(arguments, secret)
        config = settings.engine
        tokenizer = load_tokenizer(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        keys = PromptKeys(tokenizer, settings.server)
        apart = None
        if prefills is not None:
            group = ReplicaGroup(PREFILLS, _sender(prefills), min(HANG_S, settings.hang_seconds))
            apart = Prefills(group, ENGINES, settings.prefill_min_tokens)
        engine_group = ReplicaGroup(ENGINES, _sender(engines), settings.hang_seconds)
        self._door = Door(engine_group, keys, settings.server.limits.max_body_bytes, apart)

    async def __call__(self, request: Request) -> Response:
        answer = await self._door.answer(request)
        # Serve's proxy gives the request its id, and the answer the same header.
        answer.raw_headers = [pair for pair in answer.raw_headers if pair[0] != b"x-request-id"]
        return answer


def _sender(replicas: DeploymentHandle) -> Send:
    """Sends requests to the replicas of a handle."""
    handle = replicas.options(stream=True)

    async def send(request: CarriedRequest, ticket: int) -> AsyncGenerator[AnswerPart, None]:
        parts: Any = handle.answer.remote(request, ticket=ticket)
        is_over = False
        try:
            async for part in parts:
                yield part
            is_over = True
        except (RayActorError, ReplicaUnavailableError) as error:
            is_over = True
            raise ReplicaLostError(str(error)) from error
        finally:
            if not is_over:
                with suppress(Exception):
                    parts.cancel()

    return send


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application. *raises:* ArgumentError: as `ClusterSettings.from_arguments`."""
    settings = ClusterSettings.from_arguments(arguments)
    secret = secrets.token_bytes(32)
    scaling: dict[str, Any] = {"num_replicas": settings.num_engines}
    if settings.max_replicas is not None:
        policy = AutoscalingPolicy(policy_function="quire.cluster.scaling:desired_replicas")
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.min_replicas or 1,
                max_replicas=settings.max_replicas,
                target_ongoing_requests=settings.target_requests,
                upscale_delay_s=settings.scale_up_seconds,
                downscale_delay_s=settings.scale_down_seconds,
                policy=policy,
            )
        }
    engines = _deployment("engine", settings, scaling).bind(arguments, secret)
    prefills: list[serve.Application] = []
    if settings.prefill_replicas:
        number = {"num_replicas": settings.prefill_replicas}
        prefills = [_deployment("prefill", settings, number).bind(arguments, secret, is_prefill=True)]
    door = serve.deployment(
        DoorDeployment,
        name="door",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_OPEN,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
        logging_config=_LOGGING,
    )
    return door.bind(engines, arguments, secret, *prefills)


def _deployment(name: str, settings: ClusterSettings, scaling: Mapping[str, Any]) -> serve.Deployment:
    """A deployment of engines; its name is that of their table."""
    return serve.deployment(
        EngineDeployment,
        name=name,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        max_ongoing_requests=_MAX_OPEN,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
        logging_config=_LOGGING,
        request_router_config=RequestRouterConfig(
            request_router_class="quire.cluster.serve_router:QuireRouter",
            request_routing_stats_period_s=settings.digest_seconds,
        ),
        **scaling,
    )
