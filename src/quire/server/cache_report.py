"""The cache's report on a prompt, for an answer: how much of it was found, and why no more.

A request asks with `"cache_report": true`, or with the header `X-Cache-Report: true` on every door. The report is made
before the request begins; its tenant sees its own and published content only.

Cost: that of `quire.engine.prompt_explanation`, before the first step of the request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.prompt_explanation import PromptExplanation
from quire.server.api_errors import ApiError

__all__ = ["HEADER", "asked_by_header", "header_of", "report_of"]

HEADER = "X-Cache-Report"
_AROUND = 8  # tokens before a difference
_MAX_HEADER = 4096  # bytes of an answer's header


def asked_by_header(value: str | None) -> bool:
    """*raises:* ApiError: another value than true or false."""
    if value is None:
        return False
    if value.lower() not in ("true", "false", "1", "0"):
        raise ApiError(400, f"expected true or false, got {value[:40]!r}", param=HEADER)
    return value.lower() in ("true", "1")


def report_of(
    explanation: PromptExplanation, decode: Callable[[Sequence[int]], str] | None, num_prepared: int = 0
) -> dict[str, Any]:
    """decode: None for a model without a tokenizer. num_prepared: found tokens that were computed ahead.

    matched_tokens: found, by `memory` and each tier. first_missing: position of the first token that was not;
    None if all but the last are found. cause: of `prompt_explanation.Reason`. where_it_differs: with `differs`, the
    position, and the text around it here and in the nearest stored prefix.
    """
    report: dict[str, Any] = {
        "prompt_tokens": explanation.num_tokens,
        "matched_tokens": {"memory": explanation.num_hit_tokens, **explanation.num_tier_tokens},
        "prepared_tokens": num_prepared,
        "first_missing": explanation.stop,
        "cause": explanation.reason,
        "below_a_block": explanation.is_end,
        "text": str(explanation).splitlines()[-1],
    }
    for name, seconds in (
        ("lost_seconds_ago", explanation.lost_s_ago),
        ("unused_seconds", explanation.idle_s),
    ):
        if seconds is not None:
            report[name] = round(seconds, 3)
    if explanation.tier_losses:
        report["lost_by_tier"] = {tier: round(ago, 3) for tier, ago in explanation.tier_losses.items()}
    if explanation.silent_tiers:
        report["silent_tiers"] = list(explanation.silent_tiers)
    if explanation.reason == "differs" and explanation.differs_at is not None:
        at = explanation.differs_at
        asked, stored = explanation.difference()
        words: dict[str, Any] = {"position": at}
        if decode is not None:
            words["before"] = decode(explanation.tokens[max(0, at - _AROUND) : at].tolist())
            words["asked"], words["stored"] = decode(asked), decode(stored)
        report["where_it_differs"] = words
    return report


def header_of(reports: Sequence[dict[str, Any]]) -> str:
    """The reports as the value of an answer's header, in ASCII; without texts if they are long."""
    value: Any = reports[0] if len(reports) == 1 else list(reports)
    text = json.dumps(value)
    if len(text) > _MAX_HEADER:
        left = ("text", "where_it_differs")
        short = [{name: part for name, part in one.items() if name not in left} for one in reports]
        text = json.dumps(short[0] if len(short) == 1 else short[:8])
    return text
