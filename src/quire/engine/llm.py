"""`quire.LLM`: a model, its paged cache and an engine in one object; prompts in, texts out.

Cost: construction loads the model and reserves address space for the cache; its memory is committed on use and
never exceeds `kv_memory`. A call costs the model's steps. Any thread may call; one thread (`driver.py`) computes the
steps of all calls, which share the batch.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from quire.cache.prefix_key import NamespaceKeywords, PrefixKey, PrefixKeywords
from quire.config import EngineConfig, shows_options, takes_options
from quire.engine.blocking import begin, run
from quire.engine.conversation import Conversation
from quire.engine.core import EngineCore
from quire.engine.driver import Driver, in_driver
from quire.engine.llm_monitor import LLMMonitor
from quire.engine.llm_pins import LLMPins
from quire.engine.llm_tenants import LLMTenants
from quire.engine.text_stream import TextStream
from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt, pair_params
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestKeywords, RequestOptions
from quire.sessions.transcript import Transcript

if TYPE_CHECKING:
    from quire.offload.open_tiers import OpenTiers
    from quire.sessions.snapshots import Snapshot

__all__ = ["LLM", "TextStream"]

Result = TypeVar("Result")
_log = logging.getLogger("quire")


class LLM:
    """Generates text with any decoder model of transformers, with a bounded KV cache that shares prefixes if it can.

    model: None (the embedded one), a folder, a GGUF file, a Hub id, or a loaded (PreTrainedModel, tokenizer or None).
    The options are the fields of `quire.config.EngineConfig`; config: all of them in one object instead.

    An LLM belongs to the process that made it: in a child of `os.fork` every call raises OtherProcessError, except
    `close`, which does nothing.

    *raises:* ArgumentError, LoadError, UnsupportedModelError, CapacityError: one line each; no part stays open.
    """

    @overload
    def __init__(self, model: Any = None, *, config: EngineConfig) -> None: ...
    @overload
    @takes_options(EngineConfig)
    def __init__(self, *arguments: Any, **options: Any) -> None: ...
    @shows_options
    def __init__(self, model: Any = None, **options: Any) -> None:
        config = EngineConfig.from_arguments(model, options)
        self.core = core = EngineCore(config)
        self.name, self.tokenizer, self.spec = core.name, core.tokenizer, core.spec
        self.vocab_size, self.max_model_len = core.vocab_size, core.max_model_len
        self.max_num_seqs = config.max_num_seqs
        self.storage, self.block_size = core.storage_name, core.budget.block_size
        self.cache, self.engine, self.runner = core.cache, core.engine, core.runner
        self.profile = core.profile
        self.driver = Driver(
            core.engine,
            core.close,
            num_threads=core.num_threads,
            on_idle=core.idle_trim if core.budget.idle_trim_s else None,
            idle_s=core.budget.idle_trim_s,
        )
        self.tenants = LLMTenants(core, self.driver)
        self.pins = LLMPins(core, self.driver)
        self.monitor = LLMMonitor(core, self.driver)
        self._finalizer = weakref.finalize(  # dropped without `close`, or at exit
            self, self.driver.close
        )
        try:
            if config.prefault:
                self.prefault()
            if config.kv_events is not None:
                self.monitor.publish_events(config.kv_events, config.kv_events_replay)
        except BaseException:
            self.close()
            raise
        _log.info("%s: %s", self.name, self.capacity)

    # -- capacity ------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks that the cache has now."""
        return self.core.budget.num_blocks

    @property
    def kv_memory_bytes(self) -> int:
        """Bytes that the blocks take at most."""
        return self.core.budget.num_bytes

    @property
    def max_num_full_sequences(self) -> int:
        """Sequences of `max_model_len` tokens that the cache holds at once."""
        return self.core.budget.max_num_full_sequences

    @property
    def max_num_tokens(self) -> int:
        """Tokens that the cache holds in sequences of at most `max_model_len`."""
        return self.core.budget.max_num_tokens

    @property
    def tiers(self) -> OpenTiers | None:
        """The tiers below the cache; None if there are none, or once closed."""
        return self.core.tiers

    @property
    def capacity(self) -> str:
        """The cache's capacity, and the sizes of quantized weights, in one line."""
        return "; ".join(filter(None, (str(self.core.budget), self.core.weights)))

    # -- generating ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> list[RequestOutput]:
        """The outputs of one or many prompts, in their order.

        prompts: a string, a list of token ids, a list of chat messages (dicts with role and content), or a
            list of such. sampling_params: one for all or one for each. progress: shows a progress bar on stderr.
        priority, cache_priority: see `RequestOptions`. tenant, cache_salt, namespace, extra_keys: see `PrefixKey`.
        *raises:* PromptError, ArgumentError, CapacityError before anything runs if any prompt or parameter
        cannot be served. A request that fails while it runs has `finish_reason` "error" and `error` set; the
        others go on, and the error is raised only if no prompt succeeded. KeyboardInterrupt ends all
        requests of the call and frees their blocks.
        """
        requests = self._requests(prompts, sampling_params, options)
        finished = [output for output in run(self.driver, self.engine, requests, progress=progress) if output]
        errors = [output.error for output in finished if output.error is not None]
        if errors and len(errors) == len(finished):
            raise errors[0]
        for output in finished:
            if output.error is not None:
                _log.error("request %s failed: %s", output.request_id, output.error)
        return finished

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> TextStream:
        """The text of one prompt (n = 1) piece by piece: `for piece in llm.stream(prompt): ...`. options: see
        `generate`."""
        requests = self._requests(
            [prompt] if isinstance(prompt, str) else prompt, sampling_params, options, stream=True
        )
        if len(requests) != 1 or requests[0][1].params.n != 1:
            n = requests[0][1].params.n if requests else 1
            raise ArgumentError(f"expected one prompt with n=1 to stream, got {len(requests)} with n={n}")
        return TextStream(
            self.driver, *begin(self.driver, self.core, lambda engine: engine.submit(*requests[0]))
        )

    def fork(self, request: TextStream | str, params: SamplingParams | None = None) -> TextStream:
        """Forks a request under way, given as a stream or an id: a stream that continues from its newest token.

        They share blocks; a partial one is copied. params: see `Engine.fork`. A conversation has its own `fork`.
        """
        parent = request if isinstance(request, str) else request.request_id
        forked = begin(self.driver, self.core, lambda engine: engine.fork(parent, params, stream=True))
        return TextStream(self.driver, *forked)

    def refuse_autocast(self) -> None:
        """*raises:* ArgumentError: the calling thread is inside of `torch.autocast`."""
        self.core.changes.refuse_autocast()

    def between_steps(self, function: Callable[[], Result]) -> Result:
        """Calls `function` in the engine's thread between two steps, where it may use the engine; its result."""
        return self.driver.call_open(function)

    def _requests(
        self, prompts: Any, params: Any, options: RequestKeywords, *, stream: bool = False
    ) -> list[tuple[Prompt, RequestOptions]]:
        self.driver.require_open()
        self.refuse_autocast()
        self.driver.refuse_to_wait_here()
        pairs = pair_params(prompts, params, self.tokenizer)
        return [(prompt, RequestOptions.of(own, stream=stream, **options)) for prompt, own in pairs]

    # -- conversations ---------------------------------------------------------------------------------

    def conversation(self, prompt: Any = None, **key: Unpack[PrefixKeywords]) -> Conversation:
        """A conversation that begins with a prompt, as for `generate`, or empty.

        key: of its content, see `PrefixKey`. *raises:* PromptError.
        """
        self.driver.require_open()
        first = Transcript.with_prompt(self.core.reader, PrefixKey.of(**key), prompt)
        return Conversation(self.core, self.driver, first)

    def resume(self, name: str, *, recompute: bool = False, **key: Unpack[NamespaceKeywords]) -> Conversation:
        """The conversation that `Conversation.snapshot` has saved under a name in the disk cache.

        key: that of the saved conversation. recompute: accept another model's snapshot, for its tokens alone.
        *raises:* ArgumentError: no such snapshot, or another model's; LoadError: its file is damaged.
        """
        self.driver.require_open()
        found = self.core.load_snapshot(name, PrefixKey.of_namespace(**key), recompute=recompute)
        return Conversation(self.core, self.driver, found)

    def snapshots(self, **key: Unpack[NamespaceKeywords]) -> list[Snapshot]:
        """The snapshots of a key in the disk cache, by name."""
        self.driver.require_open()
        return self.core.snapshots().list(self.engine.tenants.namespace_of(PrefixKey.of_namespace(**key)))

    def remove_snapshot(self, name: str, **key: Unpack[NamespaceKeywords]) -> None:
        """*raises:* ArgumentError: no snapshot of that name."""
        self.driver.require_open()
        self.core.snapshots().remove(name, self.engine.tenants.namespace_of(PrefixKey.of_namespace(**key)))

    # -- memory ----------------------------------------------------------------------------------------

    @in_driver
    def resize(self, kv_memory: str | int) -> None:
        """Changes the KV cache's budget, also while requests run; freed memory goes back to the system at once.

        Cached prefixes are evicted first, the least recently used before others; if that is not enough, requests are
        preempted and computed again when there is room.
        *raises:* ArgumentError, CapacityError: nothing was changed.
        """
        self.core.budget.resize(kv_memory)

    def flush(self) -> None:
        """Stores all content of the cache in the tiers, durably, and waits for that. Does nothing without tiers.

        Steps of other threads go on meanwhile.
        """
        self.driver.require_open()
        if (tiers := self.tiers) is not None:
            tiers.flush(self.between_steps)
            self.between_steps(self.engine.collect)

    @in_driver
    def trim(self) -> None:
        """Gives the memory of all blocks that no request holds back to the system; cached prefixes are lost.

        The budget stays; memory is taken again as needed. An idle engine keeps cached prefixes (`idle_trim`).
        """
        self.core.budget.trim()

    @in_driver
    def prefault(self) -> bool:
        """Takes the memory of all blocks from the system now, so that no step waits for page faults.

        Also waits until saved weights (`saved_weights`) are in huge pages, if they are moved there. False after memory
        was given back (`trim`, `resize`), or if the system cannot. Takes about 0.2 s for each GiB, and several seconds
        in a virtual machine whose host has to find the memory first.
        *raises:* ArgumentError: another storage than "paged".
        """
        return self.core.prefault()

    # -- other -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts of the cache and of the engine since the start, see `docs/contracts.md`."""
        return self.monitor.stats()

    @property
    def kv_committed_bytes(self) -> int:
        """Memory that the cache has taken from the system; 0 once closed."""
        self.driver.process.check()
        return self.core.bytes_committed

    def close(self) -> None:
        """Ends all requests, stores missing content in the tiers, frees the cache's memory, restores the model.

        A second call does nothing, nor does a call in a child of `os.fork`.
        """
        if not self.driver.process.is_here:
            return
        try:
            self.driver.close()
        finally:
            self.monitor.stop_publishing()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
