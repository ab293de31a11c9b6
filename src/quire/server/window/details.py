"""One unit, one sequence: what the administrator sees after a click. Tokens are told here and nowhere else.

Of storages that keep a sequence in one piece, whose units are tokens or pages, a range of units is told at once.

`unit_details` and `sequence_details` run in the engine's thread and copy; `readable` makes text of tokens elsewhere.
Cost: `unit_details` O(units + tokens before the unit), once a click.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from quire.cache.row_cache import RowCache
from quire.engine.llm import LLM
from quire.engine.request import Sample
from quire.server.errors import ApiError
from quire.server.tenants import name_of_owner
from quire.server.window.snapshot import runs_of, table_of

__all__ = ["readable", "sequence_details", "unit_details"]

_STATES = ("free", "cached", "held", "leased", "given up", "pinned")
_MAX_TOKENS = 2048  # of those before the unit
_MAX_HOLDERS = 64


def unit_details(llm: LLM, unit: int, last: int | None = None) -> dict[str, Any]:
    """State, holders and tokens of a unit, or of all up to `last`, where the storage has rows. *raises:* ApiError where
    there is none of that number."""
    cache = llm.cache
    units = cache.unit_map()
    last = unit if last is None else last
    if not 0 <= unit <= last < len(units.states):
        raise ApiError(
            404,
            f"expected a {cache.unit} of 0 to {len(units.states) - 1}, got {unit if last == unit else (unit, last)}",
            param="unit",
            code="no_such_unit",
        )
    if isinstance(cache, RowCache):
        return _of_rows(llm, cache, unit, last)
    if last != unit:
        raise ApiError(400, f"expected one {cache.unit}, got {unit} to {last}", param="last")
    running = [sample for sample in llm.engine.scheduler.running if sample.sequence is not None]
    holders = [sample for sample in running if (table_of(llm, sample) == unit).any()]
    details: dict[str, Any] = {
        "unit": unit,
        "last": unit,
        "kind": cache.unit,
        "state": _STATES[int(units.states[unit])],
        "bytes": cache.unit_bytes,
        "num_holders": len(holders),
        "holders": [_holder(sample) for sample in holders[:_MAX_HOLDERS]],
        "tenant": None,
        "tokens": [],
        "before": [],
        "first_position": None,
    }
    content = cache.content_of(unit)
    if content is not None:
        tokens, num_own = content.tokens, content.num_own
        details["tenant"] = name_of_owner(llm.engine.tenants.owner_of(content.namespace))
    elif holders:  # computed just now, or to be
        tokens, num_own = _tokens_at(llm, holders[0], unit)
        details["tenant"] = name_of_owner(holders[0].request.tenant)
    else:
        return details
    first = len(tokens) - num_own
    details["first_position"] = first
    details["tokens"] = tokens[first:].tolist()
    details["before"] = tokens[max(0, first - _MAX_TOKENS) : first].tolist()
    return details


def _of_rows(llm: LLM, cache: RowCache, unit: int, last: int) -> dict[str, Any]:
    """Likewise of a range of tokens or pages: the tokens are those of the first sequence that has some of it. A page
    has one layer's part of many tokens, so all of its sequence's are told."""
    running = {s.sequence.id: s for s in llm.engine.scheduler.running if s.sequence is not None}
    spans = [
        (row, first, count) for row, first, count in cache.spans() if first <= last and unit < first + count
    ]
    mine = [(running[row], first, count) for row, first, count in spans if row in running]
    details: dict[str, Any] = {
        "unit": unit,
        "last": last,
        "kind": cache.unit,
        "state": "held" if any(row >= 0 for row, _, _ in spans) else "leased" if spans else "free",
        "bytes": cache.unit_bytes * (last - unit + 1),
        "num_holders": len(mine),
        "holders": [_holder(sample) for sample, _, _ in mine[:_MAX_HOLDERS]],
        "tenant": None,
        "tokens": [],
        "before": [],
        "first_position": None,
        "place": None,
    }
    if not mine:
        return details
    sample, first, count = mine[0]
    tokens = sample.sequence.tokens
    begin, end = 0, len(tokens)
    if cache.unit == "token":  # the range lies in the order of its tokens
        begin, end = max(unit, first) - first, min(last + 1, first + count) - first
    begin = max(begin, min(end, len(tokens)) - _MAX_TOKENS)
    details["tenant"] = name_of_owner(sample.request.tenant)
    details["place"] = [first, count]
    details["first_position"] = begin
    details["tokens"] = tokens[begin:end].tolist()
    details["before"] = tokens[max(0, begin - _MAX_TOKENS) : begin].tolist()
    return details


def _tokens_at(llm: LLM, sample: Sample, unit: int) -> tuple[Any, int]:
    """The sample's tokens up to the unit's last, and how many of them are the unit's."""
    size = llm.cache.block_size
    for group in range(llm.cache.num_groups):
        places = (sample.sequence.block_table(group) == unit).nonzero()[0]
        if len(places):
            first = int(places[0]) * size
            tokens = sample.sequence.tokens[: first + size]
            return tokens, max(0, len(tokens) - first)
    return sample.sequence.tokens[:0], 0


def sequence_details(llm: LLM, request_id: str, index: int) -> dict[str, Any]:
    """A running sample with its whole block table and its tokens. *raises:* ApiError where it has ended."""
    for sample in llm.engine.scheduler.running:
        if sample.request.request_id == request_id and sample.index == index and sample.sequence is not None:
            tokens = sample.sequence.tokens
            return {
                **_holder(sample),
                "runs": runs_of(table_of(llm, sample)),
                "num_tokens": len(tokens),
                "tokens": tokens[-_MAX_TOKENS:].tolist(),
            }
    raise ApiError(404, "expected a running sequence, got one that has ended", code="no_such_sequence")


def _holder(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.request.request_id,
        "index": sample.index,
        "tenant": name_of_owner(sample.request.tenant),
    }


def readable(details: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The details with text for tokens: each of the unit's own, and what stands before it."""
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
