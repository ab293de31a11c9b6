"""Identifies the cached content that a request may use: `PrefixKey` from the caller, `ResolvedKey` for the cache.

`Tenants.resolve` turns a `PrefixKey`, once for each request, into a `ResolvedKey`, whose namespace cannot be guessed.
Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

__all__ = ["NOBODYS", "NamespaceKeywords", "PrefixKey", "PrefixKeywords", "ResolvedKey"]


class NamespaceKeywords(TypedDict, total=False):
    """The fields of `PrefixKey` except extra_keys, as keywords of a public call."""

    tenant: str | None
    cache_salt: str | None
    namespace: bytes


class PrefixKeywords(NamespaceKeywords, total=False):
    """All fields of `PrefixKey` as keywords of a public call."""

    extra_keys: Mapping[int, bytes] | None


@dataclass(frozen=True)
class PrefixKey:
    """Prompts with equal keys and equal tokens share their cached content; others never do.

    tenant: a tenant that was added, see `LLM.tenants`; None for no tenant. cache_salt: text that divides the tenant's
    content further. namespace: an adapter's or the like, within the tenant's. extra_keys: {position: bytes} that
    separate contents with equal token ids, from that position on; see `quire.Cache.match`.
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
        """`of` for calls without extra_keys: a snapshot keeps its own."""
        return cls._of(keywords, NamespaceKeywords)

    @classmethod
    def _of(cls, keywords: Mapping[str, Any], known: type) -> PrefixKey:
        unknown = sorted(keywords.keys() - known.__annotations__.keys())
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
        return cls(**keywords)


@dataclass(frozen=True)
class ResolvedKey:
    """The place of a prompt's content. owner_id: the owner of its memory. priority: the tenant's, added to the
    request's. weight: the tenant's, of its share of computed tokens.

    num_published: tokens of the prompt that belong to a published prefix.
    """

    namespace: bytes = b""
    extra_keys: Mapping[int, bytes] | None = None
    owner_id: int = 0
    priority: int = 0
    num_published: int = 0
    weight: float = 1.0

    @property
    def content(self) -> dict[str, Any]:
        """The keywords that the calls of a cache take."""
        return {"namespace": self.namespace, "extra_keys": self.extra_keys}


NOBODYS = ResolvedKey()
"""The key of content without tenant, salt or namespace."""
