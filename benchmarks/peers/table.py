"""The comparison's outcome as a Markdown table: medians, ratio to the best peer, the machine's limit, targets.

Arithmetic and text only. Quire is the first engine; the others are its peers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Row", "markdown", "verdict"]

DECODE_SHARE, PREFILL_SHARE = 0.80, 0.75


@dataclass
class Row:
    """A case and what each engine made of it.

    Args:
        figures: engine -> one per repetition. reasons: engine -> why it has none.
        limits: the machine's, one per repetition; empty where there is none.
        target: least ratio to the best peer (more is better), or most of it (less is better).
        most: instead of a ratio, the most that it may be.
        least_share: of the limit.
    """

    name: str
    unit: str
    higher_is_better: bool
    target: float | None = None
    most: float | None = None
    least_share: float | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    limits: list[float] = field(default_factory=list)

    def median(self, engine: str) -> float | None:
        figures = self.figures.get(engine)
        return statistics.median(figures) if figures else None

    def best_peer(self, engines: list[str]) -> str | None:
        have = [engine for engine in engines[1:] if self.figures.get(engine)]
        if not have:
            return None
        key: Callable[[str], float] = lambda engine: self.median(engine) or 0.0  # noqa: E731
        return max(have, key=key) if self.higher_is_better else min(have, key=key)

    def ratio(self, engines: list[str]) -> float | None:
        """How much better than the best peer: above 1 is better, whichever way the figure goes."""
        best, ours = self.best_peer(engines), self.median(engines[0])
        if best is None or ours is None:
            return None
        theirs = self.median(best)
        assert theirs is not None
        return ours / theirs if self.higher_is_better else theirs / ours

    def share(self, engine: str) -> float | None:
        """Of the machine's limit."""
        ours = self.median(engine)
        if ours is None or not self.limits:
            return None
        limit = statistics.median(self.limits)
        return ours / limit if self.higher_is_better else limit / ours


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def markdown(rows: list[Row], engines: list[str], precision: dict[str, str]) -> str:
    """The table, the precisions, and why there are holes in it."""
    notes: list[str] = []
    head = ["", *(f"{engine}<br>{precision[engine]}" for engine in engines)]
    head += ["ratio to the best peer", "limit of the machine", "our share of it"]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        cells = [f"{row.name}, {row.unit}"]
        cells += [_cell(row, engine, notes) for engine in engines]
        cells += [_ratio_cell(row, engines), _number(statistics.median(row.limits)) if row.limits else "", ""]
        share = row.share(engines[0])
        if share is not None:
            cells[-1] = f"{share:.0%}"
            if row.least_share is not None:
                cells[-1] += f" (>= {row.least_share:.0%}: {verdict(share >= row.least_share)})"
        lines.append(_line(cells))
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines).rstrip() + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cell(row: Row, engine: str, notes: list[str]) -> str:
    value = row.median(engine)
    if value is not None:
        return _number(value)
    reason = row.reasons.get(engine)
    if reason is None:
        return "-"
    if reason not in notes:
        notes.append(reason)
    return f"cannot ({notes.index(reason) + 1})"


def _ratio_cell(row: Row, engines: list[str]) -> str:
    ours = row.median(engines[0])
    if row.most is not None:
        return "" if ours is None else f"(<= {_number(row.most)}: {verdict(ours <= row.most)})"
    ratio, best = row.ratio(engines), row.best_peer(engines)
    if ratio is None or best is None:
        return ""
    text = f"{ratio:.2f} ({best}"
    return text + (")" if row.target is None else f"; >= {row.target}: {verdict(ratio >= row.target)})")
