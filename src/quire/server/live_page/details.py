"""Details of one block or one sequence, for the administrator's click; and the words that name a branch.

A storage that keeps a sequence in one piece has tokens or pages as blocks; a range of them is described together.

`block_details` and `sequence_details` run in the engine's thread and copy; `readable` decodes tokens in another
thread. Cost: `block_details` O(blocks + tokens before the block), once for each click.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from quire.baselines.row_cache import RowCache
from quire.engine.engine_view import EngineView
from quire.scheduler.request import RequestSequence
from quire.server.api_errors import ApiError
from quire.server.api_keys import name_of_owner
from quire.server.live_page.page_snapshot import runs_of, table_of

__all__ = ["block_details", "first_words", "fork_words", "readable", "sequence_details"]

_STATES = ("free", "cached", "held", "in flight", "given up", "pinned")
_MAX_TOKENS = 2048  # before the block
_MAX_HOLDERS = 64
_MAX_WORDS = 48  # characters
_MAX_WORD = 16  # characters of the word within which a branch begins
_NUM_WORD_TOKENS = 8  # searched for that word


def block_details(view: EngineView, block_id: int, last: int | None = None) -> dict[str, Any]:
    """State, holders and tokens of a block; of all blocks up to `last`, if the storage has rows. *raises:* ApiError:
    no block has that number."""
    cache = view.cache
    blocks = cache.block_map()
    last = block_id if last is None else last
    if not 0 <= block_id <= last < len(blocks.states):
        raise ApiError(
            404,
            f"expected a {cache.block_name} of 0 to {len(blocks.states) - 1}, got "
            f"{block_id if last == block_id else (block_id, last)}",
            param="block",
            code="no_such_block",
        )
    if isinstance(cache, RowCache):
        return _row_details(view, cache, block_id, last)
    if last != block_id:
        raise ApiError(400, f"expected one {cache.block_name}, got {block_id} to {last}", param="last")
    holders = [sequence for sequence in view.running if (table_of(view, sequence) == block_id).any()]
    details: dict[str, Any] = {
        "block": block_id,
        "last": block_id,
        "kind": cache.block_name,
        "state": _STATES[int(blocks.states[block_id])],
        "bytes": cache.block_bytes,
        "num_holders": len(holders),
        "holders": [_holder(sequence) for sequence in holders[:_MAX_HOLDERS]],
        "tenant": None,
        "tokens": [],
        "before": [],
        "first_position": None,
    }
    content = cache.content_of(block_id)
    if content is not None:
        tokens, num_own = content.tokens, content.num_own
        details["tenant"] = name_of_owner(view.tenants.owner_of(content.namespace))
    elif holders:  # just computed, or about to be
        tokens, num_own = _tokens_at(view, holders[0], block_id)
        details["tenant"] = name_of_owner(holders[0].request.tenant)
    else:
        return details
    first = len(tokens) - num_own
    details["first_position"] = first
    details["tokens"] = tokens[first:].tolist()
    details["before"] = tokens[max(0, first - _MAX_TOKENS) : first].tolist()
    return details


def _row_details(view: EngineView, cache: RowCache, block_id: int, last: int) -> dict[str, Any]:
    """Likewise for a range of tokens or pages, with the tokens of the first sequence in it. A page has one layer's
    part of many tokens, so all tokens of its sequence are given."""
    running = {sequence.cache_sequence.id: sequence for sequence in view.running}
    spans = [
        (row, first, count)
        for row, first, count in cache.spans()
        if first <= last and block_id < first + count
    ]
    held = [(running[row], first, count) for row, first, count in spans if row in running]
    details: dict[str, Any] = {
        "block": block_id,
        "last": last,
        "kind": cache.block_name,
        "state": "held" if any(row >= 0 for row, _, _ in spans) else "in_flight" if spans else "free",
        "bytes": cache.block_bytes * (last - block_id + 1),
        "num_holders": len(held),
        "holders": [_holder(sequence) for sequence, _, _ in held[:_MAX_HOLDERS]],
        "tenant": None,
        "tokens": [],
        "before": [],
        "first_position": None,
        "place": None,
    }
    if not held:
        return details
    sequence, first, count = held[0]
    tokens = sequence.cache_sequence.tokens
    begin, end = 0, len(tokens)
    if cache.block_name == "token":  # the range lies in the order of its tokens
        begin, end = max(block_id, first) - first, min(last + 1, first + count) - first
    begin = max(begin, min(end, len(tokens)) - _MAX_TOKENS)
    details["tenant"] = name_of_owner(sequence.request.tenant)
    details["place"] = [first, count]
    details["first_position"] = begin
    details["tokens"] = tokens[begin:end].tolist()
    details["before"] = tokens[max(0, begin - _MAX_TOKENS) : begin].tolist()
    return details


def _tokens_at(view: EngineView, sequence: RequestSequence, block_id: int) -> tuple[Any, int]:
    """The sequence's tokens up to the block's last, and the number of those in the block."""
    groups = view.cache.spec.groups
    for group in range(view.cache.num_groups):
        size = groups[group].tokens_per_block(view.cache.block_size)
        places = (sequence.cache_sequence.block_table(group) == block_id).nonzero()[0]
        if len(places):
            first = int(places[0]) * size
            tokens = sequence.cache_sequence.tokens[: first + size]
            return tokens, max(0, len(tokens) - first)
    return sequence.cache_sequence.tokens[:0], 0


def sequence_details(view: EngineView, request_id: str, index: int) -> dict[str, Any]:
    """A sequence with blocks: its whole block table and its tokens. *raises:* ApiError: it has ended."""
    for sequence in (*view.running, *view.loading):
        if sequence.request.request_id == request_id and sequence.index == index:
            tokens = sequence.cache_sequence.tokens
            return {
                **_holder(sequence),
                "runs": runs_of(table_of(view, sequence)),
                "num_tokens": len(tokens),
                "tokens": tokens[-_MAX_TOKENS:].tolist(),
            }
    raise ApiError(404, "expected a running sequence, got one that has ended", code="no_such_sequence")


def _holder(sequence: RequestSequence) -> dict[str, Any]:
    return {
        "id": sequence.request.request_id,
        "index": sequence.index,
        "tenant": name_of_owner(sequence.request.tenant),
    }


def first_words(tokens: list[int], tokenizer: Any) -> str | None:
    """The text of some tokens on one line, unprintable characters replaced; None without a tokenizer."""
    if tokenizer is None:
        return None
    return _one_line(tokenizer.decode(tokens))[:_MAX_WORDS] or None


def fork_words(shared: SequenceOf[int], own: SequenceOf[int], tokenizer: Any) -> tuple[str, str] | None:
    """Words for a branch: the end of a word in `shared`, if the branch begins within that word; the text of `own`,
    the tokens behind the shared ones."""
    if tokenizer is None:
        return None
    head = tokenizer.decode(list(shared[-_NUM_WORD_TOKENS:])) if shared else ""
    together = tokenizer.decode([*shared[-_NUM_WORD_TOKENS:], *own])
    text = together.removeprefix(head) if together.startswith(head) else tokenizer.decode(list(own))
    word_start = "" if not head or head[-1].isspace() or text[:1].isspace() else head.split()[-1]
    return _one_line(word_start)[-_MAX_WORD:], _one_line(text)[:_MAX_WORDS]


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def readable(details: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The details with texts: one for each of the block's tokens, and one for the tokens before it."""
    pieces: SequenceOf[str] = []
    before = ""
    if tokenizer is not None:
        pieces = [tokenizer.decode([token]) for token in details["tokens"]]
        before = tokenizer.decode(details.get("before", []))
    return {
        **{name: value for name, value in details.items() if name != "before"},
        "texts": pieces,
        "before": before,
    }
