"""`quire.LLM`: a model, its paged cache and an engine in one object; prompts in, texts out.

Cost: construction loads the model and reserves address space for the cache; its memory is committed on use and
never exceeds `kv_memory`. A call costs the model's steps. Calls from several threads take turns step by step
and share the batch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.backends import native_module
from quire.cache.feed import EventFeed
from quire.engine.engine import Engine
from quire.engine.interrupt import deferred_interrupt
from quire.engine.llm_sharing import Sharing
from quire.engine.llm_visibility import Visibility, check_endpoints
from quire.engine.preemption import Mode
from quire.engine.profile import Profile
from quire.engine.prompts import Prompt, encode, split
from quire.engine.request import RequestOutput
from quire.engine.sampling_params import SamplingParams
from quire.engine.shares import parse_share
from quire.engine.speeds import Speeds
from quire.engine.storages import StorageOptions
from quire.engine.tenants import Retention, check_secret
from quire.engine.tier_stores import Policy
from quire.engine.tiering import OpenTiers, TierOptions
from quire.engine.watch import Watch
from quire.errors import ArgumentError, QuireError
from quire.sizes import format_size
from quire.startup import short_start

if TYPE_CHECKING:
    from quire.engine.conversation import Conversation
    from quire.engine.snapshots import Snapshot, Snapshots
    from quire.engine.transcript import Reader
    from quire.memory.storage import Storage

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
        in which they survive the process, of at most disk_cache_size; several engines may share it. remote_cache: URL
        of a Redis server that engines share, "redis://host:port". Any of the three together; off if not given.
    cache_write: what goes there: "eviction" (what memory gives up, and at the end what is left) or "through" (segments
        as soon as they are computed; models with sliding windows always).
    preemption: of a request for which memory has run out: "park" (its bytes wait in host memory), "recompute" (its
        tokens are computed again) or "auto", whatever takes less time. park_memory: bytes that parked requests may
        take beside kv_memory; "auto" is a quarter of it.
    pin_memory: what pins may take of kv_memory, a size or a share. tenant_secret: 16 bytes or more that tenants'
        namespaces are made from; with the same secret a tenant finds what lower tiers have after a restart. Another
        one in each process if not given.
    kv_events, kv_events_replay: endpoints, "tcp://127.0.0.1:5557": see `publish_events`; off if not given.
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
        disk_cache_size: str | int = "8GiB",
        remote_cache: str | None = None,
        cache_write: Policy = "eviction",
        preemption: Mode = "auto",
        park_memory: str | int = "auto",
        pin_memory: str | int = "25%",
        tenant_secret: bytes | None = None,
        kv_events: str | None = None,
        kv_events_replay: str | None = None,
        profile: bool = False,
    ) -> None:
        _check_range("block_size", block_size, 1, 512)
        _check_range("max_batch_tokens", max_batch_tokens, 1, 2**20)
        _check_range("max_num_seqs", max_num_seqs, 1, 2**16)
        _check_range("seed", seed, 0, 2**63 - 1)
        if max_model_len is not None:
            _check_range("max_model_len", max_model_len, 2, 2**31 - 1)
        if num_threads is not None:
            _check_range("num_threads", num_threads, 1, 1024)
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
            None if disk_cache is None else Path(disk_cache),
            disk_cache_size,
            remote_cache,
            cache_write,
            preemption,
            park_memory,
        )
        parse_share("pin_memory", pin_memory, 1)
        check_secret(tenant_secret)
        check_endpoints(
            kv_events, kv_events_replay, prefix_caching and storage not in ("contiguous", "growing")
        )
        packed_folder = None if packed_weights is None else _folder("packed_weights", packed_weights)

        import torch

        from quire.engine.runner import Runner
        from quire.model.fingerprint import world
        from quire.model.load import load
        from quire.model.prepare import PreparedModel

        if num_threads is not None:
            torch.set_num_threads(num_threads)
            if (native := native_module()) is not None:
                native.set_num_threads(num_threads)
        loaded = load(model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        fingerprint = world(loaded, backend) if tier_options.has_tiers else b""
        prepared = PreparedModel(
            loaded, backend=backend, max_model_len=max_model_len, packed_weights=packed_folder
        )
        self._prepared = prepared
        self._storage: Storage | None = None
        self._publishers = []
        self.tiers: OpenTiers | None = None
        self.watch: Watch | None = None
        try:
            self.name: str = loaded.name
            self.tokenizer: Any = loaded.tokenizer
            self.spec = loaded.spec
            self.block_size = block_size
            self.max_num_seqs = max_num_seqs
            self.max_model_len: int = max_model_len or prepared.max_model_len
            opened = options.open(
                loaded.spec,
                max_model_len=self.max_model_len,
                max_num_seqs=max_num_seqs,
                step_tokens=max_batch_tokens,
            )
            self.storage = opened.name
            self._storage_options = options
            self._storage = opened.storage
            self.cache = opened.cache
            if self.storage == "virtual":
                self.block_size = self.cache.block_size  # of its pieces
            self.num_blocks: int = self.cache.num_blocks
            self.kv_memory_bytes: int = self.num_blocks * self.cache.unit_bytes
            self.profile = Profile() if profile else None
            self.vocab_size: int = loaded.vocab_size
            self.runner = Runner(prepared, opened.storage, num_threads=num_threads, profile=self.profile)
            speeds = Speeds()
            parking = tier_options.parking(opened.cache, opened.storage, speeds)
            feed = EventFeed(opened.cache)
            if tier_options.has_tiers:
                self.tiers = tier_options.open(opened.cache, opened.storage, fingerprint, speeds, feed)
            if opened.cache.prefix_caching:
                tier_events = None if self.tiers is None else self.tiers.events()
                self.watch = Watch(opened.cache, feed, tier_events=tier_events)
            self.engine = Engine(
                self.runner,
                opened.cache,
                vocab_size=loaded.vocab_size,
                max_model_len=self.max_model_len,
                tokenizer=loaded.tokenizer,
                eos_token_ids=loaded.eos_token_ids,
                sampling_defaults=loaded.sampling_defaults,
                max_batch_tokens=max_batch_tokens,
                max_num_seqs=max_num_seqs,
                seed=seed,
                profile=self.profile,
                speeds=speeds,
                parking=parking,
                loads=None if self.tiers is None else self.tiers.loads,
                stores=None if self.tiers is None else self.tiers.stores,
                tenant_secret=tenant_secret,
                watch=self.watch,
            )
            if self.tiers is not None:
                self.tiers.stores.owner_of = self.engine.tenants.owner_of
                self.tiers.describe_roots(self.name)
            self._pin_memory = pin_memory
            self._limit_pins()
        except BaseException:
            self.close()
            raise
        self._lock = threading.RLock()
        self._outputs: dict[str, RequestOutput | None] = {}  # of the requests that calls wait for
        if kv_events is not None:
            try:
                self.publish_events(kv_events, kv_events_replay)
            except BaseException:
                self.close()
                raise
        _log.info("%s: %s", self.name, self.capacity)

    # -- what it holds ---------------------------------------------------------------------------------

    @property
    def max_num_full_sequences(self) -> int:
        """Sequences of `max_model_len` tokens that the cache holds at once."""
        return self.num_blocks // self.cache.units_alone(self.max_model_len)

    @property
    def max_num_tokens(self) -> int:
        """Tokens that the cache holds in sequences of at most `max_model_len`."""
        units = self.cache.units_alone(self.max_model_len)
        if self.num_blocks < units:
            return self.cache.max_tokens_alone()
        return self.num_blocks * self.max_model_len // units

    @property
    def capacity(self) -> str:
        """What the cache can hold, in one line."""
        blocks = f"{self.num_blocks} {self.cache.unit}s"
        if self.storage in ("paged", "virtual"):
            blocks += f" of {self.block_size} tokens"
        return (
            f"KV cache of {format_size(self.kv_memory_bytes)}, {self.storage}, {blocks}; "
            f"holds {self.max_num_tokens} tokens, {self.max_num_full_sequences} sequences of the maximum of "
            f"{self.max_model_len} tokens"
        )

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
        encoded, params = self._prepare(prompts, sampling_params, options)
        options |= {"retention": retention, "priority": priority}
        with self._lock:
            ids: list[str] = []
            try:
                for prompt, one in zip(encoded, params, strict=True):
                    ids.append(self._submit(prompt, one, stream=False, **options))
                self._run(ids, progress)
                results = [self._outputs[request_id] for request_id in ids]
            except BaseException:
                self._abort(ids)
                raise
            finally:
                for request_id in ids:
                    self._outputs.pop(request_id, None)
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
        prompts = [prompt] if isinstance(prompt, str) else prompt
        encoded, params = self._prepare(prompts, sampling_params, options)
        options |= {"retention": retention, "priority": priority}
        if len(encoded) != 1 or params[0].n != 1:
            raise ArgumentError(
                f"expected one prompt with n=1 to stream, got {len(encoded)} with n={params[0].n if params else 1}"
            )
        with self._lock:
            return TextStream(self, self._submit(encoded[0], params[0], stream=True, **options))

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
            self._outputs[request_id] = None
            return TextStream(self, request_id)

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
    ) -> tuple[list[Prompt], list[SamplingParams]]:
        """Everything checked before anything is submitted."""
        self._require_open()
        parts = split(prompts)
        many = len(parts) > 1
        encoded = [
            encode(part, self.tokenizer, f"prompt {i}" if many else "the prompt")
            for i, part in enumerate(parts)
        ]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(encoded)
        if not isinstance(params, Sequence) or len(params) != len(encoded):
            got = len(params) if isinstance(params, Sequence) else type(params).__name__
            raise ArgumentError(
                f"expected SamplingParams, or a list of one for each of the {len(encoded)} prompts, got {got}"
            )
        for index, (prompt, one) in enumerate(zip(encoded, params, strict=True)):
            try:
                self.engine.check(prompt.token_ids, one, **options)
            except QuireError as error:
                if many:
                    error.args = (f"{error} - in prompt {index} of {len(encoded)}",)
                raise
        return encoded, list(params)

    def _require_elastic(self) -> Any:
        storage = self._require_open()
        if not storage.capabilities.elastic:
            raise ArgumentError(
                f'expected a storage whose memory can be resized, got {self.storage}; use storage="paged" or "virtual"'
            )
        return storage

    def _require_open(self) -> Storage:
        if self._storage is None:
            raise ArgumentError("expected an open LLM, got one that was closed; make a new one")
        return self._storage

    def _submit(self, prompt: Prompt, params: SamplingParams, *, stream: bool, **options: Any) -> str:
        request_id = self.engine.submit(
            prompt.token_ids, params, prompt=prompt.text, stream=stream, **options
        )
        self._outputs[request_id] = None
        return request_id

    def _run(self, ids: list[str], progress: bool) -> None:
        with _Progress(len(ids), enabled=progress) as bar:
            pending = set(ids)
            while pending:
                done = {i for i in pending if (output := self._outputs[i]) is not None and output.finished}
                pending -= done
                bar.advance(len(done))
                if pending and not done:
                    self._step()

    def _step(self) -> None:
        """One step, its outputs put where the calls look for them."""
        with deferred_interrupt():
            for output in self.engine.step():
                if output.request_id in self._outputs:
                    self._outputs[output.request_id] = output

    def _abort(self, ids: list[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)

    # -- its memory ------------------------------------------------------------------------------------

    def resize(self, kv_memory: str | int) -> None:
        """Gives the KV cache another budget, also while requests run; what it gives up goes back to the system at once.

        Cached prefixes go first, the least recently used before others; if that is not enough, requests are
        preempted and computed again when there is room.
        *raises:* ArgumentError, CapacityError: nothing was changed.
        """
        with self._lock:
            storage = self._require_elastic()
            options = replace(self._storage_options, kv_memory=kv_memory, block_size=self.block_size)
            num_blocks = options.num_blocks(
                self.spec, storage.unit_bytes, self.max_model_len, self.max_num_seqs, storage.bytes_committed
            )
            self.engine.tenants.check_resize(num_blocks)
            if num_blocks > storage.num_blocks:
                storage.resize(num_blocks)
            storage.give_back(self.engine.resize(num_blocks))
            self.num_blocks, self.kv_memory_bytes = num_blocks, num_blocks * storage.unit_bytes
            self._limit_pins()

    def _limit_pins(self) -> None:
        size = parse_share("pin_memory", self._pin_memory, self.num_blocks * self.cache.unit_bytes)
        self.cache.pins.max_units = size // self.cache.unit_bytes

    def flush(self) -> None:
        """Has the tiers hold all that the cache does, for good; waits for that. Without tiers it does nothing."""
        with self._lock:
            self._require_open()
            if self.tiers is not None:
                self.tiers.stores.flush()
                self.tiers.stack.flush()
                self._require_watch().collect()

    def trim(self) -> None:
        """Gives the memory of all blocks that no request holds back to the system: cached prefixes are forgotten.

        The budget stays; memory is taken again as it is needed.
        """
        with self._lock:
            storage = self._require_elastic()
            counts = self.engine.stats()
            given_up = self.engine.resize(max(1, counts["held"] + counts["leased"] + counts["pinned"]))
            try:
                storage.give_back(given_up)
            finally:  # the budget stays, also where the system refuses
                self.engine.resize(self.num_blocks)

    # -- the rest --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts of the cache and of the engine since the start, see `docs/architecture.md`."""
        use = self.cache.memory_use()
        return {
            **self.engine.stats(),
            **self._visible_stats(),
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
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.abort_all()
        try:
            if self.tiers is not None:
                self.tiers.close()
                self.tiers = None
                if self.watch is not None:
                    self.watch.subscribers.collect()  # what has been stored, and what ends with this process
        finally:
            self._stop_publishing()
        self._prepared.restore()
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TextStream:
    """An iterator over pieces of text; `result` is the output so far, whole once the iteration has ended.

    Closing it (or leaving it to the garbage collector) ends the request and returns its blocks.
    """

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self.request_id = request_id
        self._closed = False
        self._num_shown = 0  # characters
        self.result: RequestOutput | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._closed:
            with self._llm._lock:
                output = self._take()
                if output is None:
                    try:
                        self._llm._step()
                    except BaseException:
                        self.close()
                        raise
                    continue
            self.result = output
            if output.finished:
                self.close()
                if output.error is not None:
                    raise output.error
            # Not `new_text`: steps that others ran may have put several outputs in one place.
            text = output.outputs[0].text
            new, self._num_shown = text[self._num_shown :], len(text)
            if new:
                return new
        raise StopIteration

    def _take(self) -> RequestOutput | None:
        outputs = self._llm._outputs
        output = outputs[self.request_id]
        outputs[self.request_id] = None
        return output

    def close(self) -> None:
        """Ends the request if it still runs."""
        if not self._closed:
            self._closed = True
            with self._llm._lock:
                self._llm._outputs.pop(self.request_id, None)
                aborted = self._llm.engine.abort(self.request_id)
                self.result = aborted or self.result

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


class _Progress:
    """A bar of finished prompts on stderr, or nothing."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        if enabled:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("prompts", total=total)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)


def _folder(name: str, value: str | os.PathLike[str]) -> Path:
    """A folder to write in, made if it is not there."""
    folder = Path(value).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"expected a folder that is there or can be made, got {str(value)!r} ({error.strerror}) - in `{name}`"
        ) from error
    return folder


def _check_range(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= value <= high:
        raise ArgumentError(f"expected an integer of {low} to {high}, got {value!r} - in `{name}`")
