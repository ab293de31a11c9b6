"""Which cached content is a request's own: what it says of itself, and what the cache is asked with.

`PrefixKey` is what a caller says. `Tenants.resolve` turns it, once for each request, into a `ResolvedKey`, whose
namespace cannot be guessed. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

__all__ = ["NOBODYS", "NamespaceKeywords", "PrefixKey", "PrefixKeywords", "ResolvedKey"]


class NamespaceKeywords(TypedDict, total=False):
    """The fields of `PrefixKey`, but for extra_keys, as keywords of a public call."""

    tenant: str | None
    cache_salt: str | None
    namespace: bytes


class PrefixKeywords(NamespaceKeywords, total=False):
    """All fields of `PrefixKey` as keywords of a public call."""

    extra_keys: Mapping[int, bytes] | None


@dataclass(frozen=True)
class PrefixKey:
    """Prompts with equal keys and equal tokens share their cached content; others never do.

    tenant: one that was added, see `LLM.tenants`; None for nobody. cache_salt: text that divides the tenant's content
    further. namespace: an adapter's or the like, within the tenant's. extra_keys: {position: bytes} set apart what the
    token ids alone do not say, from that position on; see `quire.Cache.match`.
    """

    tenant: str | None = None
    cache_salt: str | None = None
    namespace: bytes = b""
    extra_keys: Mapping[int, bytes] | None = None

    @classmethod
    def of(cls, **keywords: Unpack[PrefixKeywords]) -> PrefixKey:
        """From the keywords of a call. *raises:* TypeError for unknown ones."""
        return cls._of(keywords, PrefixKeywords)

    @classmethod
    def of_namespace(cls, **keywords: Unpack[NamespaceKeywords]) -> PrefixKey:
        """`of`, where extra_keys would say nothing: they are kept with a snapshot."""
        return cls._of(keywords, NamespaceKeywords)

    @classmethod
    def _of(cls, keywords: Mapping[str, Any], known: type) -> PrefixKey:
        unknown = sorted(keywords.keys() - known.__annotations__.keys())
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
        return cls(**keywords)


@dataclass(frozen=True)
class ResolvedKey:
    """Where a prompt's content lives. owner_id: whose memory it takes. priority: the tenant's, added to the request's.

    num_published: tokens of the prompt that are everybody's.
    """

    namespace: bytes = b""
    extra_keys: Mapping[int, bytes] | None = None
    owner_id: int = 0
    priority: int = 0
    num_published: int = 0

    @property
    def content(self) -> dict[str, Any]:
        """The keywords that the calls of a cache take."""
        return {"namespace": self.namespace, "extra_keys": self.extra_keys}


NOBODYS = ResolvedKey()
"""Where content lives that has no tenant, salt or namespace."""
