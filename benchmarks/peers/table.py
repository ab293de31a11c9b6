"""The comparison's outcome as a Markdown table: medians, ratio to the best peer, the machine's limit, targets.

Ratios and shares are taken within each repetition, and their median is given: it need not be the ratio of the medians.
Arithmetic and text only. Quire is the first engine; the others are its peers.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

__all__ = ["Row", "markdown", "verdict"]

DECODE_SHARE, PREFILL_SHARE = 0.80, 0.75


@dataclass
class Row:
    """A case and the result of each engine.

    Args:
        figures: engine -> one per repetition. reasons: engine -> the reason why it has no figures.
        limits: the machine's, one per repetition; empty if there is none.
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

    def ratio_to(self, peer: str, ours: str) -> float | None:
        """How much better than that peer: above 1 is better, whichever way the figure goes.

        The median of the ratios within each repetition, not the ratio of medians: a machine that is faster in one
        repetition than in another is so for both.
        """
        return self._median_ratio(self.figures.get(ours, []), self.figures.get(peer, []))

    def best_peer(self, engines: list[str]) -> str | None:
        """Of those behind the first one, which is ours as all are whose names begin with quire: the one that we are
        least ahead of."""
        peers = [engine for engine in engines[1:] if not engine.startswith("quire")]
        ratios = {peer: self.ratio_to(peer, engines[0]) for peer in peers}
        known = {peer: ratio for peer, ratio in ratios.items() if ratio is not None}
        return min(known, key=known.__getitem__) if known else None

    def share(self, engine: str) -> float | None:
        """Of the machine's limit, likewise within each repetition."""
        return self._median_ratio(self.figures.get(engine, []), self.limits)

    def _median_ratio(self, ours: list[float], theirs: list[float]) -> float | None:
        # What is not repeated has the first repetitions' figures.
        pairs = list(zip(ours, theirs, strict=False))
        if not pairs:
            return None
        return statistics.median(a / b if self.higher_is_better else b / a for a, b in pairs)


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
    best = row.best_peer(engines)
    ratio = None if best is None else row.ratio_to(best, engines[0])
    if ratio is None:
        return ""
    text = f"{ratio:.2f} ({best}"
    return text + (")" if row.target is None else f"; >= {row.target}: {verdict(ratio >= row.target)})")
