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
from quire.cache.results import Dropped
from quire.config import EngineConfig, shows_options, takes_options
from quire.engine.conversation import Conversation
from quire.engine.engine_handle import EngineHandle
from quire.engine.open_engine import open_engine
from quire.engine.scored_prompt import ScoredPrompt, score_params
from quire.engine.text_stream import TextStream
from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.scheduler.known_texts import owner_of
from quire.scheduler.prompts import Prompt, encode, pair_params
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestKeywords, RequestOptions
from quire.sessions.transcript import Transcript

if TYPE_CHECKING:
    from quire.sessions.snapshots import Snapshot

__all__ = ["LLM", "TextStream"]

Result = TypeVar("Result")
_log = logging.getLogger("quire")


class LLM(EngineHandle):
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
        super().__init__(open_engine(config))
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
        finished = [output for output in self.driver.run(requests, progress=progress) if output]
        errors = [output.error for output in finished if output.error is not None]
        if errors and len(errors) == len(finished):
            raise errors[0]
        for output in finished:
            if output.error is not None:
                _log.error("request %s failed: %s", output.request_id, output.error)
        return finished

    def score(
        self,
        prompts: Any,
        *,
        start: int | Sequence[int] = 0,
        progress: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> list[ScoredPrompt]:
        """The log probability of each token of one or many prompts, in their order; nothing is generated.

        prompts, progress, options: as of `generate`. start: one for all or one for each; tokens before this position
            have no score, and are not computed again where their keys and values are cached.
        *raises:* as `generate`, and the first error among the prompts.
        """
        outputs = self.generate(prompts, score_params(prompts, start), progress=progress, **options)
        return [ScoredPrompt.of(output) for output in outputs]

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> TextStream:
        """The text of one prompt (n = 1) piece by piece: `for piece in llm.stream(prompt): ...`.

        options: as of `generate`. *raises:* PromptError, ArgumentError, CapacityError: before anything runs.
        """
        requests = self._requests(
            [prompt] if isinstance(prompt, str) else prompt, sampling_params, options, stream=True
        )
        if len(requests) != 1 or requests[0][1].params.n != 1:
            n = requests[0][1].params.n if requests else 1
            raise ArgumentError(f"expected one prompt with n=1 to stream, got {len(requests)} with n={n}")
        return TextStream(self.driver, *self.driver.begin(lambda engine: engine.submit(*requests[0])))

    def fork(self, request: TextStream | str, params: SamplingParams | None = None) -> TextStream:
        """Forks a request under way, given as a stream or an id: a stream that continues from its newest token.

        They share blocks; a partial one is copied. params: see `Engine.fork`. A conversation has its own `fork`.
        """
        parent = request if isinstance(request, str) else request.request_id
        self._require_ready()
        forked = self.driver.begin(lambda engine: engine.fork(parent, params, stream=True))
        return TextStream(self.driver, *forked)

    def between_steps(self, function: Callable[[], Result]) -> Result:
        """Calls `function` in the engine's thread between two steps, where it may use the engine; its result."""
        return self.driver.call_open(function)

    def _requests(
        self, prompts: Any, params: Any, options: RequestKeywords, *, stream: bool = False
    ) -> list[tuple[Prompt, RequestOptions]]:
        self._require_ready()
        self.driver.refuse_to_wait_here()
        key = RequestOptions.of(None, **options).key
        pairs = pair_params(prompts, params, self.tokenizer, self.texts, owner_of(key))
        return [(prompt, RequestOptions.of(own, stream=stream, **options)) for prompt, own in pairs]

    # -- conversations ---------------------------------------------------------------------------------

    def conversation(self, prompt: Any = None, **key: Unpack[PrefixKeywords]) -> Conversation:
        """A conversation that begins with a prompt, as for `generate`, or empty.

        key: of its content, see `PrefixKey`. *raises:* PromptError.
        """
        self.driver.require_open()
        first = Transcript.with_prompt(self._opened.reader, PrefixKey.of(**key), prompt)
        return Conversation(self._opened, first)

    def resume(self, name: str, *, recompute: bool = False, **key: Unpack[NamespaceKeywords]) -> Conversation:
        """The conversation that `Conversation.snapshot` has saved under a name in the disk cache.

        key: that of the saved conversation. recompute: accept another model's snapshot, for its tokens alone.
        *raises:* ArgumentError: no such snapshot, or another model's; LoadError: its file is damaged.
        """
        self.driver.require_open()
        saved = self._opened.load_snapshot(name, PrefixKey.of_namespace(**key), recompute=recompute)
        return Conversation(self._opened, saved)

    def snapshots(self, **key: Unpack[NamespaceKeywords]) -> list[Snapshot]:
        """The snapshots of a key in the disk cache, by name."""
        self.driver.require_open()
        return self._opened.snapshots().list(self.engine.tenants.namespace_of(PrefixKey.of_namespace(**key)))

    def remove_snapshot(self, name: str, **key: Unpack[NamespaceKeywords]) -> None:
        """Removes a snapshot; its segments stay until evicted. *raises:* ArgumentError: no such snapshot; TierError."""
        self.driver.require_open()
        self._opened.snapshots().remove(name, self.engine.tenants.namespace_of(PrefixKey.of_namespace(**key)))

    # -- memory ----------------------------------------------------------------------------------------

    def resize(self, kv_memory: str | int) -> None:
        """Changes the KV cache's budget, also while requests run; freed memory goes back to the system at once.

        Cached prefixes are evicted first, those used once before others; if that is not enough, requests are
        preempted and computed again when there is room.
        *raises:* ArgumentError, CapacityError: nothing was changed.
        """
        self.between_steps(lambda: self._opened.budget.resize(kv_memory))

    def drop(self, prompt: Any, **key: Unpack[PrefixKeywords]) -> Dropped:
        """Drops all content that begins with a prompt from memory; tiers keep theirs. prompt, key: as for `generate`.

        Blocks that requests hold are no longer findable, and free when the requests end. *raises:* PromptError;
        ArgumentError: some of it is pinned (`pins.find`); nothing changes.
        """
        tokens, prefix_key = encode(prompt, self.tokenizer).token_ids, PrefixKey.of(**key)
        return self.between_steps(lambda: self.engine.drop_prompt(tokens, prefix_key))

    def flush(self) -> None:
        """Stores all content of the cache in the tiers, durably, and waits for that. Does nothing without tiers.

        Steps of other threads go on meanwhile.
        """
        self.driver.require_open()
        if (tiers := self.tiers) is not None:
            tiers.flush(self.between_steps)
            self.between_steps(self.engine.collect)

    def trim(self) -> None:
        """Gives the memory of all blocks that no request holds back to the system; cached prefixes are lost.

        The budget stays; memory is taken again as needed. An idle engine keeps cached prefixes (`idle_trim`).
        """
        self.between_steps(self._opened.budget.trim)

    def prefault(self) -> bool:
        """Takes the memory of all blocks from the system now, so that no step waits for page faults.

        Also waits until saved weights (`saved_weights`) are in huge pages, if they are moved there. False after memory
        was given back (`trim`, `resize`), or if the system cannot. Takes about 0.2 s for each GiB, and several seconds
        in a virtual machine whose host has to find the memory first.
        *raises:* ArgumentError: another storage than "paged".
        """
        return self.between_steps(self._opened.prefault)

    # -- other -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts of the cache and of the engine since the start, see `docs/contracts.md`."""
        return self.monitor.stats()

    def close(self) -> None:
        """Ends all requests, stores missing content in the tiers, frees the cache's memory, restores the model.

        A second call does nothing, nor does a call in a child of `os.fork`.
        """
        self.driver.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
