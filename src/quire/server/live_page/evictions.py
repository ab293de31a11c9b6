"""Recent evictions as rows: blocks that were evicted one after the other for the same reason share a row.

A row has: the time, the numbers of blocks and tokens, the reason (`LOSS_REASONS`), the tenant that needed room and
its limit, the blocks' `cache_priority`, the time they were unused, the words of the last block, and whether the log
of losses may have more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.observe.history import Loss
from quire.server.api_keys import name_of_owner

__all__ = ["eviction_rows"]

_MAX_ROWS = 12
_GAP_S = 1.0  # between two blocks of a row
_SPAN_S = 5.0  # between the first and the last
_PRIORITIES = ("discard", "normal", "keep")


def eviction_rows(
    losses: Sequence[Loss],
    offset_s: float,
    num_blocks: int,
    tenants: Mapping[int, tuple[str, int | None]],
    words: Callable[[list[int]], str | None],
    *,
    are_cut: bool,
) -> list[dict[str, Any]]:
    """Rows, newest first, as `losses` are. offset_s: from the losses' clock to the snapshot's. num_blocks: of the
    pool. tenants: by number, name and quota in blocks. are_cut: the log has older losses than these."""
    rows: list[dict[str, Any]] = []
    newest = oldest = 0.0  # times of the current row's first and last block
    last: tuple[str, int, int] | None = None  # kind of the current row
    for loss in losses:
        kind = (loss.cause, loss.owner_id, loss.cache_priority)
        if kind == last and oldest - loss.at <= _GAP_S and newest - loss.at <= _SPAN_S:
            row = rows[-1]
            row["blocks"] += 1
            row["tokens"] += len(loss.tokens)
            row["idle"] = [
                min(row["idle"][0], round(loss.idle_s, 1)),
                max(row["idle"][1], round(loss.idle_s, 1)),
            ]
        elif len(rows) == _MAX_ROWS:
            return rows
        else:
            name, quota = tenants.get(loss.owner_id, (None, None))
            is_need = loss.cause in ("space", "quota")
            rows.append(
                {
                    "at": round(loss.at + offset_s, 1),
                    "blocks": 1,
                    "tokens": len(loss.tokens),
                    "reason": loss.cause,
                    "limit": num_blocks
                    if loss.cause == "space"
                    else quota
                    if loss.cause == "quota"
                    else None,
                    "tenant": name_of_owner(name) if is_need else None,
                    "cache_priority": _PRIORITIES[loss.cache_priority],
                    "idle": [round(loss.idle_s, 1)] * 2,
                    "words": words(loss.tokens.tolist()),
                    "begins": loss.parent is None,
                    "more": False,
                }
            )
            last, newest = kind, loss.at
        oldest = loss.at
    if rows:
        rows[-1]["more"] = are_cut
    return rows
