"""vLLM's fields of a beam search in a body: `use_beam_search`, `best_of`, `length_penalty`, `early_stopping`."""

from __future__ import annotations

import json
from typing import Any

from quire.server.api_errors import ApiError
from quire.server.schemas.common import SamplingBody

__all__ = ["beam_params"]


def beam_params(body: SamplingBody, n: int, max_beams: int) -> dict[str, Any]:
    """The parameters of SamplingParams for a body's beam search; none without one. One beam is greedy.

    *raises:* ApiError: fields that do not go together, by name.
    """
    width = body.best_of or n
    if not body.use_beam_search:
        if width != n:
            raise ApiError(
                400,
                f"expected best_of to be n, {n}, without use_beam_search, got {width}: drawn answers are not ranked",
                param="best_of",
            )
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if (value := getattr(body, name)) not in (None, neutral):
                raise ApiError(
                    400,
                    f"expected use_beam_search: true with {name} {json.dumps(value)}, got none",
                    param=name,
                )
        return {}
    if not n <= width <= max_beams:
        raise ApiError(
            400,
            f"expected best_of of n, {n}, to {max_beams} with use_beam_search, got {width}",
            param="best_of",
        )
    if body.temperature:
        raise ApiError(
            400,
            f"expected temperature 0 or null with use_beam_search, got {body.temperature}: beams are not drawn",
            param="temperature",
        )
    return {
        "beam_width": width,
        "length_penalty": 1.0 if body.length_penalty is None else body.length_penalty,
        "early_stopping": body.early_stopping or False,
    }
