"""vLLM's fields of a beam search in a body: `use_beam_search`, `best_of`, `length_penalty`, `early_stopping`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.server.api_errors import ApiError
from quire.server.schemas.common import SamplingBody

__all__ = ["beam_params"]


def beam_params(body: SamplingBody, n: int, max_beams: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of SamplingParams for a body's beam search. `beam_width` 1: none; None: the model's.

    defaults: of the model's generation config. Its `num_beams` holds for a body without `use_beam_search` and without
    a temperature above 0.

    *raises:* ApiError: fields that do not go together, by name.
    """
    num_beams, is_of_model = n, False
    if body.use_beam_search is None and not body.temperature:
        num_beams = defaults.get("num_beams") or 1
        is_of_model = num_beams > 1
    width = body.best_of or num_beams
    if not body.use_beam_search and not is_of_model:
        if (body.best_of or n) != n:
            raise ApiError(
                400,
                f"expected best_of to be n, {n}, without use_beam_search, got {body.best_of}: drawn answers are not "
                "ranked",
                param="best_of",
            )
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if (value := getattr(body, name)) not in (None, neutral):
                raise ApiError(
                    400,
                    f"expected use_beam_search: true with {name} {json.dumps(value)}, got none",
                    param=name,
                )
        return {"beam_width": 1}
    if not n <= width <= max_beams:
        by_model = ", num_beams of the model's generation config; send use_beam_search: false for no search"
        raise ApiError(
            400,
            f"expected best_of of n, {n}, to {max_beams} with use_beam_search, got {width}{by_model * is_of_model}",
            param="best_of",
        )
    if body.temperature:
        raise ApiError(
            400,
            f"expected temperature 0 or null with use_beam_search, got {body.temperature}: beams are not drawn",
            param="temperature",
        )
    return {
        "beam_width": None if is_of_model and not body.best_of else width,
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
    }
