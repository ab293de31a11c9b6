"""What memory gave up lately, as some rows: blocks that went one behind the other for the same reason are one.

Of each row: when, how many blocks and tokens, why (`LOSS_REASONS`), for whose need and within which limit, how the
blocks were kept (`cache_priority`), for how long they had been unused, the words of the one that went last, and whether
there were more of them than the losses that are looked at.
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
    """The newest first, as `losses` are. offset_s: from the losses' clock to the snapshot's. num_blocks: of the pool.
    tenants: by number, name and quota in blocks. are_cut: there are losses before these."""
    rows: list[dict[str, Any]] = []
    newest = oldest = 0.0  # when the first and the last block of the row at hand went
    last: tuple[str, int, int] | None = None  # its kind
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
