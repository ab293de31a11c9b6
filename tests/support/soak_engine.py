"""An engine over the embedded model's KV shape and a runner without weights: see `request_soak`.

The number of a token is in the keys of the first layer and, negated, in the values of the last one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.cache.event_dispatcher import EventDispatcher
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.engine.monitor import CacheMonitor
from quire.engine.open_storage import open_storage
from quire.offload.store import TierStores
from quire.offload.swap import Swap
from quire.offload.throughputs import Throughputs
from quire.offload.tier_load import TierLoads
from quire.scheduler.request_validator import ServedModel
from quire.simulate.cost_line import CostLine
from quire.simulate.meter import SimulatedClock
from quire.spec import KVSpec
from quire.spec.payload import PayloadLayout
from quire.step import Batch
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.disk.files import Files
from quire.tiers.host import HostTier
from quire.tiers.stack import TierStack
from quire.tiers.tier import Tier
from quire.weights.load import EMBEDDED

BLOCK = 16
NUM_BLOCKS = 80
MAX_TOKENS = 400  # of a sequence
VOCAB = 512
_PRIME = 2**31 - 1
_WEIGHTS = np.random.default_rng(11).integers(1, 2**31, MAX_TOKENS)


def _stamps(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return (np.asarray(tokens, np.int64) + 1) * 10007 + positions


def _token_of(total: int) -> int:
    return (total * 48271 + 12345) % _PRIME % VOCAB


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """What the runner draws behind `prompt`, from the tokens alone."""
    values = _stamps(np.array(prompt), np.arange(len(prompt))) * _WEIGHTS[: len(prompt)] % _PRIME
    total = int(values.sum()) % _PRIME
    found: list[int] = []
    for at in range(len(prompt), len(prompt) + num_tokens):
        found.append(_token_of(total))
        if at < MAX_TOKENS:
            total = (total + int(_stamps(np.array(found[-1]), np.array(at)) * _WEIGHTS[at] % _PRIME)) % _PRIME
    return found


class SoakRunner:
    """See the module's text. digest: of every step it was given."""

    def __init__(self, storage: Any, clock: SimulatedClock) -> None:
        self._storage = storage
        self._clock = clock
        self._cost = CostLine()
        self.digest = hashlib.sha256()

    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [blocks, tokens], as views of the storage."""
        first, last = self._storage.view(0).k, self._storage.view(len(self._storage.spec.layers) - 1).v
        return tuple(one[:, 0].view(torch.int64)[:, :, 0].numpy() for one in (first, last))  # type: ignore[return-value]

    def run(self, step: Batch) -> torch.Tensor:
        self._storage.forget(step.closed_ids)
        [(entries, slots)] = self._storage.prepare(step.plan, step.sequence_ids)
        plan = step.plan.group(0)
        self._clock.now += self._cost.seconds(len(step.input_ids), int(plan.context_lengths.sum()))
        for part in (step.sequence_ids, step.num_new_tokens, slots, [s.key[1] for s in step.sequences]):
            self.digest.update(np.asarray(part, np.int64).tobytes())
        keys, values = self._numbers()
        stamps = _stamps(step.input_ids, step.positions)
        keys[slots // BLOCK, slots % BLOCK] = stamps
        values[slots // BLOCK, slots % BLOCK] = -stamps
        logits = np.zeros((len(step.logit_rows), VOCAB), np.float32)
        for at, row in enumerate(np.asarray(step.logit_rows).tolist()):
            places = np.arange(int(step.positions[row]) + 1)
            cache_sequence = int(np.searchsorted(plan.query_start, row, side="right")) - 1
            blocks = entries[cache_sequence][places // BLOCK].astype(np.int64)
            read = keys[blocks, places % BLOCK]
            assert np.array_equal(values[blocks, places % BLOCK], -read), "keys and values were parted"
            logits[at, _token_of(int((read * _WEIGHTS[: len(places)] % _PRIME).sum()) % _PRIME)] = 1.0
        return torch.from_numpy(logits)


class _QuickFiles(Files):
    """The system's, but for the syncs: how long they take decides nothing where no process is killed."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class SoakEngine:
    """threads: tiers with threads of their own, as an engine has them; without, everything inside the calls."""

    def __init__(self, folder: Path, *, threads: bool, remote: str | None = None) -> None:
        self.spec = KVSpec.from_config(str(EMBEDDED))
        config = EngineConfig(
            kv_memory=NUM_BLOCKS * BLOCK * self.spec.bytes_per_token, block_size=BLOCK, max_num_seqs=24
        )
        opened = open_storage(config, self.spec, MAX_TOKENS)
        self.cache, self.storage = opened.cache, opened.storage
        self.clock = SimulatedClock()
        self.runner = SoakRunner(self.storage, self.clock)
        self.host = HostTier(4 << 20)
        self.disk = DiskTier(folder / "disk", 24 << 20, files=_QuickFiles())
        self.tiers: list[Tier] = [self.host, self.disk]
        self.remote: Any = None
        self._remote_url = remote or ""
        if remote is not None:
            from quire.tiers.remote.remote_tier import RemoteTier

            self.remote = RemoteTier(remote, timeout=30)  # a busy machine is no failure here
            self.tiers.append(self.remote)
        timed: dict[str, Any] = {} if threads else {"clock": self.clock, "wall_clock": self.clock}
        shape = PayloadLayout.from_spec(self.spec)
        self.stack = TierStack(
            self.tiers, shape, workers=2 if threads else 0, max_bytes_in_flight=8 << 20, **timed
        )
        speeds = Throughputs()
        feed = EventDispatcher(self.cache)
        shared = (self.cache, self.storage, self.stack, b"the soak's model", 2 * BLOCK)
        self.stores = TierStores(*shared, dispatcher=feed)
        self.engine = Engine(
            EngineParts(
                self.runner,
                self.cache,
                Swap(
                    self.cache,
                    self.storage,
                    mode="auto",
                    max_bytes=NUM_BLOCKS * self.cache.block_bytes // 4,
                    speeds=speeds,
                    clock=self.clock,
                ),
                speeds,
                loads=TierLoads(*shared, speeds),
                stores=self.stores,
                monitor=CacheMonitor(self.cache, feed, clock=self.clock, wall_clock=self.clock),
            ),
            ServedModel(VOCAB, MAX_TOKENS, sampling_defaults={"temperature": 0.0}),
            limits=StepLimits(192, 24),
            tenant_secret=b"a secret of the soak's own",
            clock=self.clock,
        )
        self.cache.pins.max_blocks = NUM_BLOCKS // 4

    def resize(self, num_blocks: int) -> None:
        """As `LLM.resize`."""
        self.engine.tenants.check_resize(num_blocks)
        if num_blocks > self.storage.num_blocks:
            self.storage.resize(num_blocks)
        self.engine.scheduler.preempt_to(num_blocks)
        self.storage.give_back(self.engine.resize(num_blocks, reason="resize"))

    def figures(self) -> dict[str, Any]:
        stats, tiers = self.engine.stats(), self.stack.stats()
        wanted = (
            "num_steps", "num_preemptions", "num_swapped", "num_restored_tokens", "num_prompt_tokens",
            "num_cached_tokens", "num_loaded_tokens", "num_generated_tokens", "copied_blocks", "evicted_blocks",
        )  # fmt: skip
        by_tier = ("stored", "refused", "dropped", "evicted", "hits", "damaged", "failures")
        return {name: stats[name] for name in wanted} | {
            tier.name: {name: getattr(tier, name) for name in by_tier} for tier in tiers.tiers
        }

    def owner_id(self) -> dict[str, Any]:
        """Everything that is there has one place, and goes when it is told to. *raises:* AssertionError."""
        engine, cache = self.engine, self.cache
        assert not engine.has_work
        assert engine.swap.num_bytes == 0
        cache.check()
        stats = cache.stats()
        assert stats["num_sequences"] == stats["held"] == stats["in_flight"] == stats["pinned"] == 0
        assert stats["free"] + stats["cached"] == cache.num_blocks == self.storage.num_blocks or (
            stats["free"] + stats["cached"] == cache.num_blocks <= self.storage.num_blocks
        )
        is_all = False
        while not is_all:
            _, is_all = self.stores.store_all()
            assert self.stack.flush(120)
        counts = self.stack.stats()
        assert counts.num_loads_running == 0
        assert all(tier.waiting_bytes == tier.damaged == tier.failures == 0 for tier in counts.tiers)
        figures: dict[str, Any] = {"disk_values": counts.tiers[1].segments, "disk_bytes": self._check_disk()}
        assert self.host.stats().num_bytes == sum(entry.value.nbytes for entry in self.host._entries.values())
        assert self.host.stats().num_bytes <= self.host.max_bytes
        if self.remote is not None:
            figures["remote_values"] = self._check_remote()
        num_free = stats["free"]
        cache.reset()
        assert cache.stats()["free"] == num_free + stats["cached"] == cache.num_blocks
        self.stores.collect()
        assert not self.stores.mirror.by_id
        for tier in (self.host, self.disk):
            keys = (
                list(self.host._entries)
                if tier is self.host
                else [entry.key for entry in self.disk.entries()]
            )
            for key in keys:
                assert tier.evict(key)
            assert (tier.stats().num_values, tier.stats().num_bytes) == (0, 0)
        self.disk.check()
        assert self.disk.usage().values == 0
        return figures

    def _check_disk(self) -> int:
        """The index's bytes are the files'; every value is whole; the bytes of the folder."""
        self.disk.check()
        entries = list(self.disk.entries())
        assert len(entries) == self.disk.stats().num_values
        for entry in entries:
            value = self.disk.peek(entry.key)
            assert value is not None
            assert value.nbytes == entry.num_bytes
        use = self.disk.usage()
        sizes = {path.name: path.stat().st_size for path in self.disk.path.iterdir()}
        slabs = sum(size for name, size in sizes.items() if name.startswith("slab-"))
        index = sum(size for name, size in sizes.items() if name.startswith("quire-cache.sqlite"))
        assert (slabs, index) == (use.slabs, use.index)
        assert sum(sizes.values()) <= self.disk.max_bytes()
        return sum(sizes.values())

    def _check_remote(self) -> int:
        """The server has this engine's keys and no others, each a whole value; then none."""
        import redis

        with redis.Redis.from_url(self._remote_url) as client:
            client.config_set("maxmemory", 0)  # or it gives keys up while they are looked at
            names: list[bytes] = list(client.scan_iter(count=1000))
            assert all(name.startswith(b"quire:kv:1:") for name in names)
            keys = [bytes.fromhex(name.rpartition(b":")[2].decode()) for name in names]
            assert all(self.remote.load(key) is not None for key in keys)
            assert all(self.remote.evict(key) for key in keys)
            assert client.dbsize() == 0
        return len(names)

    def close(self) -> None:
        self.engine.abort_all()
        assert self.stack.close(60)
        self.storage.close()
