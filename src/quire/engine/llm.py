"""`quire.LLM`: a model, its paged cache and an engine in one object; prompts in, texts out.

Cost: construction loads the model and reserves address space for the cache; its memory is committed on use and
never exceeds `kv_memory`. A call costs the model's steps. Calls from several threads take turns step by step
and share the batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.engine.arguments import check_range, writable_folder
from quire.engine.llm_sharing import Sharing
from quire.engine.llm_visibility import Visibility, check_endpoints
from quire.engine.open_model import ModelOptions, OpenModel
from quire.engine.partners import check_partners
from quire.engine.preemption import Mode
from quire.engine.prompts import Prompt, paired
from quire.engine.request import RequestOutput
from quire.engine.sampling_params import SamplingParams
from quire.engine.shares import parse_share
from quire.engine.storages import StorageOptions
from quire.engine.tenants import Retention, check_secret
from quire.engine.text_stream import TextStream
from quire.engine.tier_stores import Policy
from quire.engine.tiering import TierOptions
from quire.engine.turns import Turns
from quire.errors import ArgumentError, QuireError
from quire.startup import short_start

if TYPE_CHECKING:
    from quire.engine.conversation import Conversation
    from quire.engine.snapshots import Snapshot, Snapshots
    from quire.engine.transcript import Reader
    from quire.memory.storage import Storage
    from quire.tiers.guarded import TierCounts

__all__ = ["LLM", "TextStream"]

_log = logging.getLogger("quire")


class LLM(Sharing, Visibility):
    """Generates text with any decoder model of transformers, its KV cache bounded and, where it can be, shared.

    model: None (the embedded one), a folder, a Hub id, or a loaded (PreTrainedModel, tokenizer or None).
    kv_memory: hard cap of the KV cache: a size ("1GiB", bytes), a share of the memory free to this process
        ("40%"), or "auto": half of it, but no more than max_num_seqs sequences of max_model_len can use.
    storage: how K and V are kept: "paged" (blocks, shared prefixes), "contiguous" (one range for each sequence,
        reserved at its start; nothing shared: the baseline), "growing" (a buffer for each sequence and layer,
        replaced by a larger one when it is full), "virtual" (a row of addresses for each sequence, memory mapped
        behind it piece by piece, shared prefixes; Linux) or "auto" (virtual where the machine can, else paged).
    reservation: how much "contiguous" reserves: "max" (max_model_len), "pow2" (the next power of two that holds prompt
        and max_tokens) or "exact". growth: when buffers of "growing" are replaced: "spread" (those of different layers
        in different steps), "together" (all, by 4096 tokens) or "together:N". piece_size: bytes that "virtual" maps
        together, of keys or values of one layer: 4KiB to 2MiB.
    dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
    block_size: tokens of a block of "paged", 1 to 512. max_batch_tokens: tokens of a step. max_num_seqs: sequences that
        run at once. max_model_len: longest sequence; the model's own if not given.
    seed: of requests that bring none. revision, trust_remote_code: of a Hub id.
    backend: "native", "python" or None for the best there is. num_threads: torch's and the kernels'.
    packed_weights: a folder in which the form of the weights that the kernels read is kept, made if it is not there:
        the first start writes it, later ones map it, packing nothing, and take what the first has proved of the
        model. Used where the weights come from safetensors files and the back end is native; a file there is as
        large as the weights and may be deleted.
    host_cache: a size: that much host memory, beside kv_memory, keeps blocks that were evicted. disk_cache: a folder
        in which they survive the process, of at most disk_cache_size (8GiB if not given); several engines may share it.
        remote_cache: URL of a Redis server that engines share, "redis://host:port". Any of the three together.
    cache_write: what goes there: "eviction" (what memory gives up, and at the end what is left) or "through" (segments
        as soon as they are computed; models with sliding windows always).
    preemption: of a request for which memory has run out: "park" (its bytes wait in host memory), "recompute" (its
        tokens are computed again) or "auto", whatever takes less time. park_memory: bytes that parked requests may
        take beside kv_memory; "auto" is a quarter of it.
    pin_memory: what pins may take of kv_memory, a size or a share. tenant_secret: 16 bytes or more that tenants'
        namespaces are made from; with the same secret a tenant finds what lower tiers have after a restart. Another
        one in each process if not given.
    kv_events, kv_events_replay: endpoints, "tcp://127.0.0.1:5557": see `publish_events`; off if not given.
    prefault: takes all memory of the KV cache from the system at the start, see `prefault`; else it is taken where
        blocks are first used.
    profile: takes the times of every step; `llm.profile` tells them, and is None without.

    *raises:* ArgumentError, LoadError, UnsupportedModelError, CapacityError: in one line, nothing kept.
    """

    @short_start()
    def __init__(
        self,
        model: Any = None,
        *,
        kv_memory: str | int = "auto",
        storage: str = "paged",
        reservation: str = "max",
        growth: str = "spread",
        piece_size: str | int = "64KiB",
        dtype: str = "auto",
        block_size: int = 16,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        seed: int = 0,
        revision: str | None = None,
        trust_remote_code: bool = False,
        backend: str | None = None,
        num_threads: int | None = None,
        packed_weights: str | os.PathLike[str] | None = None,
        host_cache: str | int | None = None,
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_size: str | int | None = None,
        remote_cache: str | None = None,
        cache_write: Policy = "eviction",
        preemption: Mode = "auto",
        park_memory: str | int = "auto",
        pin_memory: str | int = "25%",
        tenant_secret: bytes | None = None,
        kv_events: str | None = None,
        kv_events_replay: str | None = None,
        prefault: bool = False,
        profile: bool = False,
    ) -> None:
        check_range("block_size", block_size, 1, 512)
        check_range("max_batch_tokens", max_batch_tokens, 1, 2**20)
        check_range("max_num_seqs", max_num_seqs, 1, 2**16)
        check_range("seed", seed, 0, 2**63 - 1)
        if max_model_len is not None:
            check_range("max_model_len", max_model_len, 2, 2**31 - 1)
        if num_threads is not None:
            check_range("num_threads", num_threads, 1, 1024)
        options = StorageOptions(  # checked before minutes of loading
            storage,
            kv_memory=kv_memory,
            block_size=block_size,
            prefix_caching=prefix_caching,
            reservation=reservation,
            growth=growth,
            piece_size=piece_size,
            backend=backend,
        )
        tier_options = TierOptions(
            host_cache,
            disk_cache,
            disk_cache_size,
            remote_cache,
            cache_write,
            preemption,
            park_memory,
        )
        check_partners(
            {
                "storage": storage,
                "reservation": reservation,
                "growth": growth,
                "piece_size": piece_size,
                "block_size": block_size,
                "host_cache": host_cache,
                "disk_cache": disk_cache,
                "disk_cache_size": disk_cache_size,
                "remote_cache": remote_cache,
                "cache_write": cache_write,
                "preemption": preemption,
                "park_memory": park_memory,
                "pin_memory": pin_memory,
                "prefault": prefault,
            }
        )
        parse_share("pin_memory", pin_memory, 1)
        check_secret(tenant_secret)
        check_endpoints(
            kv_events, kv_events_replay, prefix_caching and storage not in ("contiguous", "growing")
        )
        packed_folder = None if packed_weights is None else writable_folder("packed_weights", packed_weights)
        self._publishers = []
        self._opened = opened = OpenModel(
            ModelOptions(model, dtype, revision, trust_remote_code, backend, num_threads, packed_folder),
            options,
            tier_options,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            seed=seed,
            pin_memory=pin_memory,
            tenant_secret=tenant_secret,
            profile=profile,
        )
        self.name, self.tokenizer, self.spec = opened.name, opened.tokenizer, opened.spec
        self.vocab_size, self.max_model_len = opened.vocab_size, opened.max_model_len
        self.max_num_seqs = max_num_seqs
        self.storage, self.block_size = opened.storage_name, opened.budget.block_size
        self.cache, self.engine, self.runner = opened.cache, opened.engine, opened.runner
        self.tiers, self.watch, self.profile = opened.tiers, opened.watch, opened.profile
        self._turns = Turns(opened.engine)
        self._lock = self._turns.lock
        try:
            if prefault:
                self.prefault()
            if kv_events is not None:
                self.publish_events(kv_events, kv_events_replay)
        except BaseException:
            self.close()
            raise
        _log.info("%s: %s", self.name, self.capacity)

    # -- what it holds ---------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Units that the cache has now."""
        return self._opened.budget.num_blocks

    @property
    def kv_memory_bytes(self) -> int:
        """What those take at most."""
        return self._opened.budget.num_bytes

    @property
    def max_num_full_sequences(self) -> int:
        """Sequences of `max_model_len` tokens that the cache holds at once."""
        return self._opened.budget.max_num_full_sequences

    @property
    def max_num_tokens(self) -> int:
        """Tokens that the cache holds in sequences of at most `max_model_len`."""
        return self._opened.budget.max_num_tokens

    @property
    def capacity(self) -> str:
        """What the cache can hold, in one line."""
        return str(self._opened.budget)

    # -- generating ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        retention: Retention = "normal",
    ) -> list[RequestOutput]:
        """The outputs of one or many prompts, in their order.

        prompts: a string, a list of token ids, a list of chat messages (dicts with role and content), or a
            list of such. sampling_params: one for all or one for each.
        progress: shows a progress bar on stderr. priority, tenant, cache_salt, retention: see `Engine.submit`.
        *raises:* PromptError, ArgumentError, CapacityError before anything runs if any prompt or parameter
        cannot be served. A request that fails while it runs has `finish_reason` "error" and `error` set, and
        the others go on; its error is raised if none of the prompts succeeded. KeyboardInterrupt ends all
        requests of the call and returns their blocks.
        """
        options = {"tenant": tenant, "cache_salt": cache_salt}
        requests = self._prepare(prompts, sampling_params, options)
        options |= {"retention": retention, "priority": priority}
        with self._lock:
            results = self._turns.run(requests, progress=progress, **options)
        finished = [result for result in results if result is not None]
        errors = [result.error for result in finished if result.error is not None]
        if errors and len(errors) == len(finished):
            raise errors[0]
        for result in finished:
            if result.error is not None:
                _log.error("request %s failed: %s", result.request_id, result.error)
        return finished

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        retention: Retention = "normal",
    ) -> TextStream:
        """The text of one prompt (n = 1) piece by piece: `for piece in llm.stream(prompt): ...`."""
        options = {"tenant": tenant, "cache_salt": cache_salt}
        requests = self._prepare([prompt] if isinstance(prompt, str) else prompt, sampling_params, options)
        options |= {"retention": retention, "priority": priority}
        if len(requests) != 1 or requests[0][1].n != 1:
            n = requests[0][1].n if requests else 1
            raise ArgumentError(f"expected one prompt with n=1 to stream, got {len(requests)} with n={n}")
        with self._lock:
            request_id = self._turns.submit(*requests[0], stream=True, **options)
            return TextStream(self._turns, request_id)

    # -- branching -------------------------------------------------------------------------------------

    def conversation(
        self, prompt: Any = None, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Conversation:
        """A conversation that begins with a prompt, as `generate` takes one, or with nothing.

        namespace, extra_keys: part of the identity of its cached content, see `quire.Cache`. *raises:* PromptError.
        """
        from quire.engine.conversation import Conversation
        from quire.engine.transcript import first_transcript

        self._require_open()
        return Conversation(self, first_transcript(self._reader(), prompt, namespace, extra_keys))

    def fork(self, what: TextStream | str, params: SamplingParams | None = None) -> TextStream:
        """Branches a request under way, a stream or a request's id: a stream that goes on from its newest token.

        Its blocks are shared, one partial one is copied. params: see `Engine.fork`. A conversation has its own `fork`.
        """
        with self._lock:
            self._require_open()
            request_id = self.engine.fork(
                what if isinstance(what, str) else what.request_id, params, stream=True
            )
            self._turns.expect(request_id)
            return TextStream(self._turns, request_id)

    def resume(self, name: str, *, namespace: bytes = b"", recompute: bool = False) -> Conversation:
        """The conversation that `Conversation.snapshot` has kept under a name in the disk cache.

        recompute: its tokens alone are taken, also where it was another model's.
        *raises:* ArgumentError: there is none, or another model's; LoadError: its file is damaged.
        """
        from quire.engine.conversation import Conversation

        return Conversation(
            self, self._snapshots().resume(name, namespace, self._reader(), recompute=recompute)
        )

    def snapshots(self, *, namespace: bytes = b"") -> list[Snapshot]:
        """What there is in the disk cache, by name."""
        return self._snapshots().list(namespace)

    def remove_snapshot(self, name: str, *, namespace: bytes = b"") -> None:
        """*raises:* ArgumentError: there is none of that name."""
        self._snapshots().remove(name, namespace)

    def _snapshots(self) -> Snapshots:
        from quire.engine.snapshots import Snapshots

        self._require_open()
        return Snapshots(self.tiers, model=self.name)

    def _reader(self) -> Reader:
        from quire.engine.transcript import Reader

        return Reader(self.tokenizer, self.engine.check_tokens)

    def _in_engine(self, function: Callable[[], Any]) -> Any:
        """Calls it between two steps."""
        with self._lock:
            self._require_open()
            return function()

    def _prepare(
        self, prompts: Any, params: Any, options: dict[str, Any]
    ) -> list[tuple[Prompt, SamplingParams]]:
        """Everything checked before anything is submitted."""
        self._require_open()
        pairs = paired(prompts, params, self.tokenizer)
        for index, (prompt, one) in enumerate(pairs):
            try:
                self.engine.check(prompt.token_ids, one, **options)
            except QuireError as error:
                if len(pairs) > 1:
                    error.args = (f"{error} - in prompt {index} of {len(pairs)}",)
                raise
        return pairs

    @property
    def _storage(self) -> Storage | None:
        return self._opened.storage

    def _require_open(self) -> Storage:
        storage = self._storage
        if storage is None:
            raise ArgumentError("expected an open LLM, got one that was closed; make a new one")
        return storage

    # -- its memory ------------------------------------------------------------------------------------

    def resize(self, kv_memory: str | int) -> None:
        """Gives the KV cache another budget, also while requests run; what it gives up goes back to the system at once.

        Cached prefixes go first, the least recently used before others; if that is not enough, requests are
        preempted and computed again when there is room.
        *raises:* ArgumentError, CapacityError: nothing was changed.
        """
        with self._lock:
            self._require_open()
            self._opened.budget.resize(kv_memory)

    def flush(self) -> None:
        """Has the tiers hold all that the cache does, for good; waits for that. Without tiers it does nothing.

        Steps of other threads go on meanwhile.
        """
        self._require_open()
        if self.tiers is not None:
            self.tiers.flush(self._in_engine)
            self._in_engine(self._require_watch().collect)

    def trim(self) -> None:
        """Gives the memory of all blocks that no request holds back to the system: cached prefixes are forgotten.

        The budget stays; memory is taken again as it is needed.
        """
        with self._lock:
            self._require_open()
            self._opened.budget.trim()

    def prefault(self) -> bool:
        """Takes the memory of all blocks from the system now, so that no step waits for page faults.

        Kept weights (`packed_weights`) have come to lie in huge pages by then, if they are to.
        Whether it was done: not once memory was given back (`trim`, `resize`), nor where the system cannot. Takes about
        0.2 s for each GiB, and several seconds in a virtual machine whose host has to find the memory first.
        *raises:* ArgumentError: another storage than "paged".
        """
        with self._lock:
            self._require_open()
            return self._opened.prefault()

    # -- the rest --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts of the cache and of the engine since the start, see `docs/architecture.md`."""
        return self._stats(self.tier_counts())

    def _stats(self, tiers: Sequence[TierCounts]) -> dict[str, Any]:
        use, stats = self.cache.memory_use(), self.engine.stats()
        return {
            **stats,
            **self._visible_stats(stats, tiers),
            "kv_memory_bytes": self.kv_memory_bytes,
            "kv_committed_bytes": self.kv_committed_bytes,
            "kv_reserved_bytes": use.reserved,
            "kv_used_bytes": use.used,
            "kv_peak_bytes": use.peak,
        }

    @property
    def kv_committed_bytes(self) -> int:
        """Memory that the cache has taken from the system; 0 once closed."""
        return 0 if self._storage is None else self._storage.bytes_committed

    def close(self) -> None:
        """Ends all requests, stores in the tiers what they lack, gives the cache's memory back and the model as it was.

        Twice does nothing.
        """
        try:
            self._opened.close()
        finally:
            self.tiers = self._opened.tiers
            self._stop_publishing()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
