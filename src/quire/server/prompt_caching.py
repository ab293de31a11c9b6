"""The caching fields of OpenAI's and Anthropic's APIs, in this server's own terms: beginnings of a prompt to pin and
their time, the cache priority, and prompts without an answer.

    cache_control (Anthropic's), prompt_cache_breakpoint   pin the prompt up to their block
    prompt_cache_options      pins the whole prompt, unless its mode is explicit; prewarm: max_tokens 0
    prompt_cache_retention    24h: cache priority keep. in_memory: discard where a tier keeps content beyond memory,
                              since that is written to no tier; else nothing changes

A breakpoint stands behind a block of the body. In the prompt it is where the next block's text begins, so that the
template's text between both belongs to it; breakpoints in tools and system end where the first message's text
begins, since templates differ in the order of both. A text that the template does not show unchanged has no place of
its own: the breakpoint is then at the next one that has, or at the prompt's end.

Cost: a look at each block of a chat. With such a field, a search of each text in the prompt; for each breakpoint before
the prompt's end that is kept, tokenizing the prompt up to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.offload.open_tiers import OpenTiers
from quire.server.api_errors import ApiError
from quire.server.kept_prefixes import KeptPrefix
from quire.server.schemas.caching import SECONDS, CacheControl, PromptCacheBreakpoint
from quire.server.schemas.chat_bodies import ChatFields, ChatMessage, ChatRequest, ContentPart
from quire.server.schemas.common import SamplingBody

__all__ = ["kept_of_chat", "kept_of_prompt", "num_breakpoints", "with_own_fields"]

Body = TypeVar("Body", bound=SamplingBody)

_MAX_PINNED = 4  # breakpoints of a request: the latest, and the prompt's end among them, as in OpenAI's API
_MAX_MISSED = 64  # texts that the prompt does not have, before no more are searched


@dataclass(frozen=True)
class _PromptText:
    """A text of the body, in the order of the prompt. seconds: of a breakpoint behind it. is_head: of tools or
    system, which a template may show in another order."""

    text: str
    seconds: float | None
    is_head: bool = False


def with_own_fields(body: Body, tiers: OpenTiers | None) -> Body:
    """The body with `cache_priority` and `max_tokens` as its other caching fields say. tiers: of the engine.

    *raises:* ApiError: they contradict each other.
    """
    options, retention = body.prompt_cache_options, body.prompt_cache_retention
    if options is None and retention is None:
        return body
    changed: dict[str, Any] = {}
    if options is not None and options.prewarm:
        changed |= {
            name: 0 for name in ("max_tokens", "max_completion_tokens") if name in type(body).model_fields
        }
    priority = body.cache_priority
    if retention == "in_memory" and tiers is not None and tiers.stack.has_tiers_besides(("host",)):
        if priority not in (None, "discard"):
            raise ApiError(
                400,
                f"expected 24h or null with cache_priority {priority}: this server writes such prompts to a disk or "
                "another server; with in_memory alone it does not",
                param="prompt_cache_retention",
            )
        changed["cache_priority"] = "discard"
    elif priority is None:
        is_unmarked = options is not None and not options.has_implicit and not num_breakpoints(body)
        if is_unmarked:
            changed["cache_priority"] = "discard"
        elif retention == "24h":
            changed["cache_priority"] = "keep"
    return body.model_copy(update=changed)


def num_breakpoints(body: SamplingBody) -> int:
    """Blocks of a body that have a breakpoint, and its own `cache_control`."""
    return sum(1 for _ in _breakpoints(body)) if isinstance(body, ChatFields) else 0


def kept_of_prompt(body: SamplingBody, num_tokens: int) -> list[KeptPrefix]:
    """The beginnings to keep of a prompt in which blocks have no place: all of it, or none."""
    options, found = body.prompt_cache_options, []
    if options is not None and options.has_implicit:
        found.append(options.seconds)
    if isinstance(body, ChatFields):
        found += [_seconds(one, _default_seconds(body)) for one in _breakpoints(body)]
    return [KeptPrefix(num_tokens, max(found))] if found else []


def _breakpoints(body: ChatFields) -> Iterator[CacheControl | PromptCacheBreakpoint]:
    """Those of a body. Every chat is looked at, so nothing is made for a block without one."""
    if body.cache_control is not None:
        yield body.cache_control
    for tool in body.tools or ():
        if tool.cache_control is not None:
            yield tool.cache_control
    for message in _messages(body):
        if isinstance(message.content, list):
            for part in message.content:
                if part.cache_control is not None or part.prompt_cache_breakpoint is not None:
                    yield from _of_part(part)
        if (
            message.cache_control is not None
            or message.copilot_cache_control is not None
            or message.tool_calls
        ):
            yield from _behind(message)


def _of_part(part: ContentPart) -> Iterator[CacheControl | PromptCacheBreakpoint]:
    yield from filter(None, (part.cache_control, part.prompt_cache_breakpoint))


def _behind(message: ChatMessage) -> Iterator[CacheControl]:
    """Breakpoints behind all of a message."""
    yield from filter(None, (message.cache_control, message.copilot_cache_control))
    for call in message.tool_calls or ():
        yield from filter(None, (call.cache_control, call.function.cache_control))


def _messages(body: ChatFields) -> Sequence[ChatMessage]:
    return getattr(body, "messages", None) or ()


def _seconds(marked: CacheControl | PromptCacheBreakpoint, default: float) -> float:
    """default: of a breakpoint that names no time."""
    if isinstance(marked, CacheControl):
        return marked.seconds
    return default if marked.ttl is None else SECONDS[marked.ttl]


def _default_seconds(body: SamplingBody) -> float:
    return SECONDS["30m"] if body.prompt_cache_options is None else body.prompt_cache_options.seconds


async def kept_of_chat(
    body: ChatRequest, prompt: str, token_ids: Sequence[int], encode: Callable[[str], Awaitable[list[int]]]
) -> list[KeptPrefix]:
    """The beginnings to keep, longest first; without those that a longer one keeps as long.

    prompt, token_ids: of the messages, before `truncate_prompt_tokens`. encode: tokens of a beginning of the prompt.
    """
    if not (body.prompt_cache_options or num_breakpoints(body)):
        return []
    kept: list[KeptPrefix] = []
    for end, seconds in sorted(_ends(body, prompt), reverse=True):
        if kept and seconds <= kept[-1].seconds:
            continue
        num_tokens = len(token_ids)
        if end < len(prompt):
            beginning = await encode(prompt[:end])
            pairs = enumerate(zip(beginning, token_ids, strict=False))
            num_tokens = next((at for at, (one, other) in pairs if one != other), len(beginning))
        num_tokens = _num_left(body, num_tokens, len(token_ids))
        if num_tokens > 0:
            kept.append(KeptPrefix(num_tokens, seconds))
    return kept


def _num_left(body: SamplingBody, num_tokens: int, num_all: int) -> int:
    """How many of a prompt's first tokens are in it after `truncate_prompt_tokens`."""
    limit = body.truncate_prompt_tokens
    if limit is None or num_all <= limit:
        return num_tokens
    return min(num_tokens, limit) if body.truncation_side == "right" else num_tokens - (num_all - limit)


def _ends(body: ChatRequest, prompt: str) -> list[tuple[int, float]]:
    """(characters of the prompt, seconds) of each breakpoint that counts."""
    texts, options = list(_texts(body)), body.prompt_cache_options
    starts: list[int | None] = []
    position = num_missed = 0
    for entry in texts:
        text = entry.text.strip()
        found = prompt.find(text, position) if text and num_missed < _MAX_MISSED else -1
        num_missed += bool(text) and found < 0
        starts.append(found if found >= 0 and not entry.is_head else None)
        position = found + len(text) if found >= 0 else position
    whole = [body.cache_control.seconds] if body.cache_control is not None else []
    if options is not None and options.has_implicit:
        whole.append(options.seconds)
    ends = [(len(prompt), seconds) for seconds in whole]
    end = len(prompt)
    for entry, start in zip(reversed(texts), reversed(starts), strict=True):
        if entry.seconds is not None and len(ends) < _MAX_PINNED:
            ends.append((end, entry.seconds))
        end = end if start is None else start
    return ends


def _texts(body: ChatRequest) -> Iterator[_PromptText]:
    default = _default_seconds(body)

    def longest(found: Iterator[CacheControl | PromptCacheBreakpoint]) -> float | None:
        return max((_seconds(one, default) for one in found), default=None)

    for tool in body.tools or ():
        yield _PromptText("", tool.cache_control and tool.cache_control.seconds, is_head=True)
    is_head = True
    for message in body.messages:
        is_head = is_head and message.role in ("system", "developer")
        if isinstance(message.content, str):
            yield _PromptText(message.content, None, is_head)
        for part in message.content if isinstance(message.content, list) else ():
            yield _PromptText(part.text or "", longest(_of_part(part)), is_head)
        if (seconds := longest(_behind(message))) is not None:
            yield _PromptText("", seconds, is_head)
