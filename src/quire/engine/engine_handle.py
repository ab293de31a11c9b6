"""`EngineHandle`: the facts and the objects of an open engine that `LLM` and `AsyncEngine` share.

No property waits for a step. The calls are `LLM`'s, which blocks, and `AsyncEngine`'s, which
awaits the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.cache.protocol import KVCache
from quire.config import secret_bytes
from quire.engine.engine_view import EngineView
from quire.engine.open_engine import OpenEngine

if TYPE_CHECKING:
    from quire.engine.driver import Driver
    from quire.engine.engine import Engine
    from quire.engine.engine_monitor import EngineMonitor
    from quire.engine.profile import Profile
    from quire.engine.prompt_pins import PromptPins
    from quire.engine.runner import Runner
    from quire.engine.session_calls import Sessions
    from quire.offload.open_tiers import OpenTiers
    from quire.scheduler.known_texts import KnownTexts
    from quire.scheduler.tenants import Tenants
    from quire.spec import KVSpec

__all__ = ["EngineHandle"]


class EngineHandle:
    """See the module's text."""

    def __init__(self, opened: OpenEngine) -> None:
        self._opened = opened

    def _require_ready(self) -> None:
        """*raises:* ArgumentError, OtherProcessError: the calling thread cannot have a request computed now."""
        self._opened.driver.require_open()
        self._opened.changes.refuse_autocast()

    # -- the model -------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._opened.model.loaded.name

    @property
    def tokenizer(self) -> Any:
        """None if prompts and answers are token ids."""
        return self._opened.model.loaded.tokenizer

    @property
    def texts(self) -> KnownTexts:
        """Encodes long texts: of one that begins as a text of the same owner, only the end."""
        return self._opened.texts

    @property
    def vocab_size(self) -> int:
        return self._opened.model.loaded.vocab_size

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Defaults of requests by the model's generation config, see `SamplingParams.resolved`."""
        return self._opened.model.loaded.sampling_defaults

    @property
    def spec(self) -> KVSpec:
        """The keys and values of a token, as the cache stores them."""
        return self._opened.model.spec

    # -- parts: for callers in the driver's thread, except where they say otherwise ----------------------

    @property
    def driver(self) -> Driver:
        return self._opened.driver

    @property
    def engine(self) -> Engine:
        return self._opened.engine

    @property
    def runner(self) -> Runner:
        return self._opened.runner

    @property
    def cache(self) -> KVCache:
        return self._opened.cache

    @property
    def tiers(self) -> OpenTiers | None:
        """The tiers below the cache; None if there are none, or once closed."""
        return self._opened.tiers

    @property
    def profile(self) -> Profile | None:
        """Times of the parts of each step; None without `profile=True`."""
        return self._opened.profile

    @property
    def view(self) -> EngineView:
        """The state of the engine for readers in its thread (`between_steps`)."""
        return EngineView(self._opened)

    # -- for any thread ----------------------------------------------------------------------------------

    @property
    def pins(self) -> PromptPins:
        """Prompts that stay in memory."""
        return self._opened.pins

    @property
    def sessions(self) -> Sessions:
        """The sessions of clients: what is held, and loaded or given up on request."""
        return self._opened.sessions

    @property
    def tenants(self) -> Tenants:
        """Tenants with quotas, floors and priorities."""
        return self._opened.tenants

    @property
    def monitor(self) -> EngineMonitor:
        """Explanations, events and reports."""
        return self._opened.monitor

    @property
    def failure(self) -> BaseException | None:
        """The error of the last step; None after a successful one."""
        return self._opened.driver.failure

    def has_request(self, request_id: str) -> bool:
        """True if a request of this id waits or runs."""
        return request_id in self._opened.engine.scheduler.requests

    def has_secret(self, name: str, secret: bytes) -> bool:
        """True if the engine was opened with this `tenant_secret` or `remote_secret`."""
        own = getattr(self._opened.config, name)
        return own is not None and secret_bytes(own) == secret

    # -- capacity ----------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return self._opened.model.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once at most."""
        return self._opened.config.max_num_seqs

    @property
    def storage(self) -> str:
        """The storage's name."""
        return self._opened.storage_name

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._opened.budget.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that the cache has now."""
        return self._opened.budget.num_blocks

    @property
    def kv_memory_bytes(self) -> int:
        """Bytes that the blocks take at most."""
        return self._opened.budget.num_bytes

    @property
    def kv_committed_bytes(self) -> int:
        """Memory that the cache has taken from the system; 0 once closed. A millisecond for each GiB of the pool."""
        self._opened.driver.process.check()
        return self._opened.bytes_committed

    @property
    def max_num_full_sequences(self) -> int:
        """Sequences of `max_model_len` tokens that the cache holds at once."""
        return self._opened.budget.max_num_full_sequences

    @property
    def max_num_tokens(self) -> int:
        """Tokens that the cache holds in sequences of at most `max_model_len`."""
        return self._opened.budget.max_num_tokens

    @property
    def cache_capacity(self) -> str:
        """The cache's capacity in one line."""
        return str(self._opened.budget)

    @property
    def capacity(self) -> str:
        """`cache_capacity`, the sizes of quantized weights, and whether torch's own products compute (`fast`)."""
        is_fast = "+fast@" in self._opened.prepared.device.name
        mode = "fast: products by torch, bits may depend on the batch" if is_fast else ""
        return "; ".join(filter(None, (self.cache_capacity, self._opened.model.weights, mode)))
