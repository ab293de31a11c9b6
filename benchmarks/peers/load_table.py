"""The results of the servers' run: figures of a point, the highest rate within the limits, the table, our losses.

Arithmetic and text only. Quire is the first engine.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from client import Outcome

__all__ = ["FIGURES", "Ladder", "Point", "figures_of", "markdown"]

FIRST_LIMIT_MS, GAP_LIMIT_MS = 1000.0, 200.0
# What a row gives, its heading, and whether more is better.
FIGURES = {
    "first_p50_ms": ("first token p50, ms", False),
    "first_p99_ms": ("first token p99, ms", False),
    "gap_p99_ms": ("between tokens p99, ms", False),
    "tokens_per_s": ("tokens/s", True),
}


def figures_of(outcomes: list[Outcome], began: float) -> dict[str, float]:
    """Of the requests of one open loop that was begun then. Failed ones are counted, and are in no other figure."""
    good = [one for one in outcomes if one.error is None]
    figures = {"requests": float(len(outcomes)), "failed": float(len(outcomes) - len(good))}
    if good:
        first = [1e3 * one.first_s for one in good]
        gaps = [1e3 * gap for one in good for gap in one.gaps_s]
        figures["first_p50_ms"] = percentile(first, 50)
        figures["first_p99_ms"] = percentile(first, 99)
        figures["gap_p99_ms"] = percentile(gaps, 99)
        figures["tokens_per_s"] = sum(one.num_tokens for one in good) / (
            max(one.last_at for one in good) - began
        )
    return figures


def percentile(values: list[float], percent: int) -> float:
    """The least value that so many of a hundred do not exceed; of fewer than 100, p99 is the largest."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def is_within(figures: dict[str, float]) -> bool:
    """No request failed, and the limits on the first token and between tokens hold."""
    return (
        not figures["failed"]
        and figures["first_p99_ms"] < FIRST_LIMIT_MS
        and figures["gap_p99_ms"] < GAP_LIMIT_MS
    )


@dataclass
class Ladder:
    """The highest rate within the limits, from the measurements so far."""

    held: list[float] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)

    def note(self, rate: float, *, within: bool) -> None:
        (self.held if within else self.broken).append(rate)

    @property
    def highest(self) -> float:
        """The highest rate within them below the lowest one beyond them; 0: there is none."""
        return max((rate for rate in self.held if rate < self._lowest_broken), default=0.0)

    @property
    def _lowest_broken(self) -> float:
        return min(self.broken, default=float("inf"))

    def next_rate(self) -> float:
        """The next rate: halfway between the two, or a quarter more than the one that held."""
        if not self.broken:
            return self.highest * 1.25
        return (self.highest + self._lowest_broken) / 2


@dataclass
class Point:
    """A rate at which an engine was loaded, and its result in each round.

    Args:
        group, of: the rate that this one is a share of, in words, and its engine. share: in percent.
        rate: requests a second.
    """

    engine: str
    group: str
    of: str
    share: int
    rate: float
    rounds: list[dict[str, float]] = field(default_factory=list)

    def median(self, figure: str) -> float | None:
        values = [one[figure] for one in self.rounds if figure in one]
        return statistics.median(values) if values else None

    def total(self, figure: str) -> int:
        return round(sum(one[figure] for one in self.rounds))


def markdown(points: list[Point], saturations: dict[str, float], ladders: dict[str, Ladder]) -> str:
    """The table, a line for each engine, and where the first engine is behind."""
    head = ["load", "engine", "requests/s", *(heading for heading, _ in FIGURES.values()), "failed"]
    lines = [_line(head), _line(["---"] * len(head))]
    for point in points:
        cells = [f"{point.share} % of {point.group}", point.engine, f"{point.rate:.2f}"]
        cells += [_number(point.median(figure)) for figure in FIGURES]
        lines.append(_line([*cells, f"{point.total('failed')} of {point.total('requests')}"]))
    lines += ["", *_summary(saturations, ladders), "", *_behind(points, saturations, ladders)]
    return "\n".join(lines) + "\n"


def _summary(saturations: dict[str, float], ladders: dict[str, Ladder]) -> list[str]:
    limits = f"first token p99 under {FIRST_LIMIT_MS / 1e3:.0f} s and between tokens p99 under {GAP_LIMIT_MS:.0f} ms"
    head = ["", "saturation, requests/s", f"highest rate with {limits}"]
    lines = [_line(head), _line(["---"] * len(head))]
    for engine, rate in saturations.items():
        highest = ladders[engine].highest
        lines.append(_line([engine, f"{rate:.2f}", f"{highest:.2f}" if highest else "none"]))
    return lines


def _behind(points: list[Point], saturations: dict[str, float], ladders: dict[str, Ladder]) -> list[str]:
    """A line for each figure in which a peer is ahead of the first engine at the same load."""
    ours = next(iter(saturations))
    if len(saturations) == 1:
        return []
    own = {point.share: point for point in points if point.engine == ours}
    lines = []
    for point in points:
        if point.engine == ours:
            continue
        for figure, (heading, more_is_better) in FIGURES.items():
            theirs, mine = point.median(figure), own[point.share].median(figure)
            if theirs is None or mine is None:
                continue
            if theirs > mine if more_is_better else theirs < mine:
                at = f"{point.share} % of {point.group}"
                lines.append(f"{heading} at {at}: {_number(mine)}, {point.engine} {_number(theirs)}")
    for peer, rate in saturations.items():
        if rate > saturations[ours]:
            lines.append(f"saturation: {saturations[ours]:.2f}, {peer} {rate:.2f}")
        if ladders[peer].highest > ladders[ours].highest:
            lines.append(f"highest rate: {ladders[ours].highest:.2f}, {peer} {ladders[peer].highest:.2f}")
    return (
        [f"{ours} is behind in:", *(f"- {line}" for line in lines)] if lines else [f"{ours} is ahead in all."]
    )


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
