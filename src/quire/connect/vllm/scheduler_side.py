"""`SchedulerSide`: finds the prefixes of vLLM's requests in the tiers, and decides what is loaded and saved.

A prompt's stored prefix is loaded into host memory, and verified, before vLLM is told that it is there; vLLM asks again
in each step until then, and other requests go on. So a load cannot fail later: a damaged or missing value is a shorter
prefix, and the rest is computed.

A prompt is saved as it is computed, in whole segments, and its last blocks when it is complete. Output tokens are saved
when the request ends. A decode step copies nothing.

Invariants
    V2  a key names only blocks whose tokens are known and computed; drafts that were refused are behind them.
    V3  the blocks of a request that has ended stay its own until they are copied.

Cost: a prompt's hashes when it begins to wait; a step O(its requests).
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from quire.cache.block_hash import root_key
from quire.connect.vllm.connector_options import ConnectorOptions
from quire.connect.vllm.model_identity import adapter_digest
from quire.connect.vllm.prefix_load import LoadedPart, PrefixLoad
from quire.connect.vllm.salt_quota import SaltQuota
from quire.connect.vllm.step_transfers import BlockLoad, BlockSave, StepResults, StepTransfers
from quire.tiers.segment import segment_tokens
from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack

__all__ = ["ConnectedRequest", "SchedulerSide"]

_log = logging.getLogger("quire")

_MAX_STORED = 1 << 16  # keys that are remembered as stored
_IDLE_WAIT_S = 0.002  # of a step without tokens, for a load


class ConnectedRequest(Protocol):
    """The fields of vLLM's `Request` that are read here."""

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    skip_reading_prefix_cache: bool


@dataclass(eq=False)
class _Tracked:
    """A request. block_ids: its blocks. asked_s: when its first look-up began. offered_at: tokens that vLLM had when it
    was last told of a load. num_planned, parent: tokens in whole segments that are saved or being saved, and the last
    one's hash."""

    request: ConnectedRequest
    root: bytes
    extra_keys: tuple[tuple[int, bytes], ...]
    asked_s: float
    block_ids: list[int] = field(default_factory=list)
    load: PrefixLoad | None = None
    offered_at: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    num_planned: int = 0
    parent: bytes | None = None
    is_prompt_saved: bool = False


class SchedulerSide:
    """stack: the tiers, which it closes. fingerprint: `model_identity`. reads, writes: whether
    prefixes are loaded, and saved. on_root: called with each root before its first segment is stored."""

    def __init__(
        self,
        stack: TierStack,
        fingerprint: bytes,
        block_size: int,
        options: ConnectorOptions,
        *,
        reads: bool = True,
        writes: bool = True,
        on_root: Callable[[bytes], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stack = stack
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._segment_tokens = segment_tokens(stack.layout, block_size)
        self._options = options
        self._reads, self._writes = reads, writes
        self._on_root = on_root
        self._clock = clock
        self._quota = None if options.salt_quota is None else SaltQuota(stack, options.salt_quota)
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[BlockLoad] = []
        self._last_saves: dict[str, list[BlockSave]] = {}
        self._releasing: set[str] = set()
        self._saving: dict[int, tuple[SegmentKey, str]] = {}
        self._numbers = itertools.count()
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._has_warned = False
        self._roots: dict[tuple[str | None, str | None], bytes] = {}

    # -- before a step --------------------------------------------------------------------------------------

    def num_stored_tokens(self, request: ConnectedRequest, num_computed: int) -> int | None:
        """Tokens behind the first `num_computed` that have been loaded; None: ask again in the next step."""
        tracked = self._track(request)
        if tracked is None or not self._reads or request.skip_reading_prefix_cache:
            return 0
        stop = (
            (request.num_tokens - 1) // self._block_size * self._block_size
        )  # the last token is always computed
        if stop <= num_computed:
            return 0
        is_late = self._clock() - tracked.asked_s > self._options.max_wait_s
        if tracked.load is None or num_computed < tracked.load.start:
            if is_late:
                return 0
            if not self._has_room(stop - num_computed):
                return None
            tracked.load = PrefixLoad(
                self.stack,
                tracked.root,
                np.array(request.all_token_ids, np.int32),
                tracked.extra_keys,
                num_computed,
                stop,
                segment_tokens=self._segment_tokens,
                block_size=self._block_size,
            )
        load = tracked.load
        if not load.done.is_set():
            if not is_late:
                return None
            load.cancel()
        tracked.offered_at = num_computed
        return max(0, load.end - num_computed)

    def _has_room(self, num_tokens: int) -> bool:
        """Whether a load of so many tokens may begin: within `load_memory`, or alone."""
        held = sum(one.load.num_bytes for one in self._requests.values() if one.load is not None)
        return not held or held + self.stack.layout.num_bytes(num_tokens) <= self._options.load_memory

    def take_blocks(self, request: ConnectedRequest, block_ids: Sequence[int], num_loaded: int) -> None:
        """vLLM has given the request blocks; `num_loaded` of the tokens offered are to be loaded into them."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.block_ids = list(block_ids)
        load, tracked.load = tracked.load, None
        tracked.sources.clear()
        if load is None:
            return
        if num_loaded:
            start, stop = tracked.offered_at, tracked.offered_at + num_loaded
            for part in load.parts:
                self._load_part(tracked, part, start, stop)
        self._note_used([part.key for part in load.parts])

    def _load_part(self, tracked: _Tracked, part: LoadedPart, start: int, stop: int) -> None:
        first, last = max(start, part.key.start), min(stop, part.key.end)
        if first >= last:
            return
        size = self._block_size
        tracked.sources[part.tier] += last - first
        self._loads.append(
            BlockLoad(
                part.payload,
                len(part.key.tokens) // size,
                (first - part.key.start) // size,
                tuple(tracked.block_ids[first // size : last // size]),
            )
        )

    def sources_of(self, request: ConnectedRequest) -> Counter[str]:
        """By tier, the tokens of the request's last load."""
        tracked = self._requests.get(request.request_id)
        return Counter() if tracked is None else tracked.sources

    def _track(self, request: ConnectedRequest) -> _Tracked | None:
        """None for a request whose prompt is not tokens alone, or may still grow."""
        tracked = self._requests.get(request.request_id)
        if tracked is None and _is_plain(request):
            if getattr(request, "kv_transfer_params", None) and not self._has_warned:
                self._has_warned = True
                _log.warning("kv_transfer_params of requests are for other connectors: this one has none")
            extra_keys = sorted(
                (one.mm_position.offset, str(one.identifier).encode()) for one in request.mm_features
            )
            tracked = _Tracked(request, self._root(request), tuple(extra_keys), self._clock())
            self._requests[request.request_id] = tracked
        return tracked

    def _root(self, request: ConnectedRequest) -> bytes:
        adapter = request.lora_request
        named = (request.cache_salt, None if adapter is None else f"{adapter.lora_name}\0{adapter.lora_path}")
        root = self._roots.get(named)
        if root is None:
            parts = [b"vllm", (request.cache_salt or "").encode()]
            if adapter is not None:
                parts.append(adapter_digest(adapter.lora_path).encode())
            namespace = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
            root = self._roots[named] = root_key(self._fingerprint, namespace)
            self._on_root(root)
        return root

    # -- a step ---------------------------------------------------------------------------------------------

    def plan_step(
        self,
        new: Iterable[tuple[str, Sequence[int], int]],
        running: Iterable[tuple[str, Sequence[int], int]],
        num_scheduled: dict[str, int],
    ) -> StepTransfers:
        """The transfers of a step.

        new, running: (request id, blocks, computed tokens before the step) of requests that begin or resume, with all
        their blocks, and of those that go on, with new ones. num_scheduled: tokens of the step, by request id.
        """
        transfers = StepTransfers(loads=self._loads, last_saves=self._last_saves)
        self._loads, self._last_saves = [], {}
        for is_new, requests in ((True, new), (False, running)):
            for request_id, block_ids, num_computed in requests:
                tracked = self._requests.get(request_id)
                if tracked is None:
                    continue
                if is_new:
                    tracked.block_ids = list(block_ids)
                else:
                    tracked.block_ids += block_ids
                if self._writes and not tracked.is_prompt_saved:
                    reach = num_computed + num_scheduled.get(request_id, 0)
                    transfers.saves += self._save_prompt(tracked, reach)
        if not num_scheduled:
            self._wait_for_load()
        return transfers

    def _save_prompt(self, tracked: _Tracked, reach: int) -> list[BlockSave]:
        prompt = tracked.request.prompt_token_ids
        assert prompt is not None
        tracked.is_prompt_saved = reach >= len(prompt)
        return self._plan_saves(tracked, prompt[:reach], with_rest=tracked.is_prompt_saved)

    def _plan_saves(self, tracked: _Tracked, computed: Sequence[int], *, with_rest: bool) -> list[BlockSave]:
        """Saves of what is not stored yet of computed tokens; with_rest: also of the blocks behind the last segment."""
        size, start = self._segment_tokens, tracked.num_planned
        whole = len(computed) // size * size
        tokens = np.array(computed[start:], np.int32)
        keys = self._keys(tracked, tokens[: whole - start], size, start)
        if keys:
            tracked.num_planned, tracked.parent = keys[-1].end, keys[-1].hash
        if with_rest:
            rest = tokens[tracked.num_planned - start :]
            rest = rest[: len(rest) // self._block_size * self._block_size]
            keys += self._keys(tracked, rest, self._block_size, tracked.num_planned)
        owner = "" if tracked.request.cache_salt is None else f"salt {tracked.root.hex()[:8]}"
        saves = []
        for key in keys:
            block_ids = tuple(tracked.block_ids[key.start // self._block_size : key.end // self._block_size])
            if self._is_stored(key) or len(block_ids) * self._block_size != len(key.tokens):
                continue
            number = next(self._numbers)
            self._saving[number] = key, owner
            self._note_stored(key)
            saves.append(BlockSave(number, block_ids))
        return saves

    def _keys(self, tracked: _Tracked, tokens: np.ndarray, size: int, start: int) -> list[SegmentKey]:
        return segment_keys(
            tracked.root, tokens, size, start=start, parent=tracked.parent, extra_keys=tracked.extra_keys
        )

    def _is_stored(self, key: SegmentKey) -> bool:
        return key.hash in self._stored and not self.stack.losses([key.hash])

    def _note_stored(self, key: SegmentKey) -> None:
        self._stored[key.hash] = None
        self._stored.move_to_end(key.hash)
        if len(self._stored) > _MAX_STORED:
            self._stored.popitem(last=False)

    def _note_used(self, chain: Sequence[SegmentKey]) -> None:
        for key in chain:
            self._note_stored(key)
        if self._quota is not None:
            self._quota.note_use(chain)

    def _wait_for_load(self) -> None:
        """A step without tokens only asks again: the loads get the processor for a moment."""
        for tracked in self._requests.values():
            if tracked.load is not None and not tracked.load.done.is_set():
                tracked.load.done.wait(_IDLE_WAIT_S)
                return

    # -- after a step ---------------------------------------------------------------------------------------

    def take_results(self, results: StepResults | None, ended: Iterable[str]) -> None:
        """The worker's payloads go to the tiers. ended: requests whose last blocks have been copied."""
        stored: dict[bytes, list[SegmentKey]] = {}
        for number, payload in (results or StepResults()).payloads():
            key, owner = self._saving.pop(number)
            if self.stack.store([(key, payload)], owner=owner):
                stored.setdefault(key.root, []).append(key)
            else:
                self._stored.pop(key.hash, None)  # the queues are full: saved another time
        if self._quota is not None:
            for chain in stored.values():
                self._quota.note_use(chain)
        self._releasing.difference_update(ended)

    def end(self, request: ConnectedRequest, block_ids: Sequence[int]) -> bool:
        """The request has ended, and has these blocks. True: they must stay until its last ones are copied."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.load is not None:
            tracked.load.cancel()
        if not self._writes:
            return False
        tracked.block_ids = list(block_ids)
        known = min(request.num_computed_tokens, request.num_tokens)
        saves = self._plan_saves(tracked, request.all_token_ids[:known], with_rest=True)
        if saves:
            self._last_saves[request.request_id] = saves
            self._releasing.add(request.request_id)
        return bool(saves)

    @property
    def has_copies_to_make(self) -> bool:
        """Whether blocks of requests that have ended are still to be copied."""
        return bool(self._releasing)

    def reset(self) -> None:
        """The weights may have changed: what is stored is not found again, and what follows is stored for this process
        alone."""
        self._fingerprint = os.urandom(32)
        self._roots.clear()
        self._stored.clear()
        for tracked in self._requests.values():
            tracked.root = self._root(tracked.request)
            tracked.num_planned, tracked.parent, tracked.load = 0, None, None

    def close(self) -> None:
        """Stores what is queued; ends threads, closes files and connections."""
        self.stack.close()


def _is_plain(request: ConnectedRequest) -> bool:
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not getattr(request, "resumable", False)
    )
