"""`PromptKeys`: the keys of a request's blocks, as the door computes them before a replica has seen the request.

The tokens are those of the replicas' own code (`quire.server.prompt_tokens`), the namespace is the tenant's, so that a
digest's key is equal where content can be shared. A request without a known API key gets no keys, and is not read.

Cost: the template and the tokenizer in a thread; 1 us for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cache.block_hash import block_hashes, block_number
from quire.scheduler.tenants import namespace_of_tenant
from quire.server.api_keys import ANYBODY, ApiTenant
from quire.server.dependencies import api_key_of
from quire.server.prompt_tokens import PromptReader
from quire.server.settings import ServerSettings
from quire.server.threads import Threads

__all__ = ["PromptKeys", "RoutedPrompt"]


@dataclass(frozen=True)
class RoutedPrompt:
    """block_keys: of the prompt's full blocks. num_tokens: 0 where they are not known; fallback: then the reason, of
    `router_metrics.FALLBACKS`, or None if there is nothing to know. stored: the kind and id of the stored
    content that it continues, which one replica has. token_ids, cache_salt: of the prompt."""

    block_keys: tuple[int, ...] = ()
    num_tokens: int = 0
    fallback: str | None = None
    stored: tuple[str, str] | None = None
    token_ids: Sequence[int] = ()
    cache_salt: str | None = None


class PromptKeys:
    """tokenizer: the model's; None if it has none."""

    def __init__(self, tokenizer: Any, settings: ServerSettings) -> None:
        self._reader = PromptReader(tokenizer, settings.limits)
        self._settings = settings
        self._threads = Threads()

    def tenant_of(self, request: Any) -> ApiTenant | None:
        """The tenant of a request (starlette's), None for one that the replicas will refuse."""
        key = api_key_of(request)
        found = None if key is None else self._settings.keys.find(key)
        if found is not None:
            return found.tenant
        return ANYBODY if self._settings.keys.is_empty else None

    async def of(self, path: str, body: bytes, tenant: ApiTenant, block_tokens: int) -> RoutedPrompt:
        """path: one of `GENERATING_PATHS`. block_tokens: of a block; 0: not known yet."""
        try:
            seconds = self._settings.limits.max_template_seconds
            prompt = await self._threads.run_with_timeout(seconds, self._reader.read, path, body, tenant)
        except Exception:  # the replica answers it; templates raise any kind
            return RoutedPrompt(fallback="unreadable")
        if prompt.continued is not None:
            return RoutedPrompt(stored=prompt.continued)
        if prompt.token_ids is None:
            return RoutedPrompt(fallback="no_tokens")
        if not block_tokens:
            return RoutedPrompt(num_tokens=len(prompt.token_ids), fallback="no_digest")
        namespace = self._namespace(tenant, prompt.cache_salt)
        hashes = block_hashes(namespace, np.array(prompt.token_ids, np.int32), None, block_tokens)
        return RoutedPrompt(
            tuple(map(block_number, hashes)),
            len(prompt.token_ids),
            token_ids=prompt.token_ids,
            cache_salt=prompt.cache_salt,
        )

    def _namespace(self, tenant: ApiTenant, cache_salt: str | None) -> bytes:
        name = tenant.in_engine or ""
        if not name and not cache_salt:
            return b""
        secret = self._settings.tenant_secret
        assert secret is not None, "the application gives one where the file has none"
        return namespace_of_tenant(secret, name, cache_salt or "")
