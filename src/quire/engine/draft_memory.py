"""The options and the memory of a draft model: its own `EngineConfig`, and its part of `kv_memory`.

A start and its plan ask the same functions. The memory is divided so that both models hold as many tokens of a sequence
that both can read; the weights of both are loaded before.

Invariant
    M1  the two parts together are the `kv_memory` of an engine without a draft model.

Cost: O(layers).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from quire.config import EngineConfig, draft_model_of
from quire.engine.kv_capacity import KVFit, KVLayout, fit_within, kv_layout
from quire.errors import ArgumentError, CapacityError, LoadError, UnsupportedModelError
from quire.sizes import format_size
from quire.spec import KVSpec

__all__ = [
    "DividedMemory",
    "check_rewinds",
    "divide_memory",
    "draft_config",
    "errors_of_draft",
    "with_possible_drafts",
]

# Options of the engine that its draft model has too.
_SHARED = (
    "dtype", "device", "backend", "num_threads", "packed_weights", "packed_weights_size", "block_size",
    "prefix_caching", "max_batch_tokens", "max_num_seqs", "trust_remote_code",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class DividedMemory:
    """config, draft_config: of the engine's model and of the draft model, each with its part as `kv_memory`.

    fit, draft_fit: the capacity of these parts.
    """

    config: EngineConfig
    fit: KVFit
    draft_config: EngineConfig
    draft_fit: KVFit


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """The config of the draft model of `speculation="model:PATH"`; None for another proposer."""
    if (path := draft_model_of(config.speculation)) is None:
        return None
    shared = {name: getattr(config, name) for name in _SHARED}
    return EngineConfig(path, **shared, storage="paged", generation_config="none")


@contextmanager
def errors_of_draft() -> Iterator[None]:
    """Adds to an error of a draft model that cannot be read or opened the option that names it."""
    try:
        yield
    except (ArgumentError, LoadError, UnsupportedModelError) as error:
        raise type(error)(f"{error} - of the draft model in `speculation`") from error


def with_possible_drafts(config: EngineConfig, by_own_forward: bool) -> EngineConfig:
    """The config with `speculation` off if it is auto and the model allows no drafts.

    *raises:* ArgumentError: the model's rows cannot be checked together, and a proposer was asked for.
    """
    if config.speculation == "off" or not by_own_forward:
        return config
    if config.speculation != "auto":
        raise ArgumentError(
            "expected a model whose rows can be checked together, got one that runs by its own forward, whose bits "
            "depend on the number of rows; use speculation off or auto - in `speculation`"
        )
    return replace(config, speculation="off")


def check_rewinds(draft: EngineConfig, spec: KVSpec, by_own_forward: bool) -> None:
    """*raises:* ArgumentError: the draft model's tokens cannot be taken back."""
    if by_own_forward or spec.states:
        reason = "has state layers" if spec.states else "runs by its own forward"
        raise ArgumentError(
            f"expected a draft model whose tokens can be taken back, got one that {reason}: {draft.model} - in "
            "`speculation`"
        )


def divide_memory(
    config: EngineConfig,
    layout: KVLayout,
    max_model_len: int,
    draft: EngineConfig,
    draft_spec: KVSpec,
    draft_max_model_len: int,
    free_bytes: int,
) -> DividedMemory:
    """The division of `kv_memory` of `config`. layout, max_model_len: of the engine's model.

    *raises:* ArgumentError, CapacityError: as `fit_within`, of the whole or of a part; then both models are named.
    """
    whole = fit_within(config, layout, max_model_len, free_bytes)
    num_tokens = min(max_model_len, draft_max_model_len)
    needed = layout.spec.bytes_for(num_tokens) + layout.spec.bytes_per_state
    draft_needed = draft_spec.bytes_for(num_tokens)
    draft_bytes = int(whole.num_bytes * draft_needed / (draft_needed + needed))
    config = replace(config, kv_memory=whole.num_bytes - draft_bytes)
    draft = replace(draft, kv_memory=draft_bytes)
    draft_layout = kv_layout("paged", draft, draft_spec, draft_max_model_len)
    try:
        return DividedMemory(
            config,
            fit_within(config, layout, max_model_len, free_bytes),
            draft,
            fit_within(draft, draft_layout, draft_max_model_len, free_bytes),
        )
    except (ArgumentError, CapacityError) as error:
        raise type(error)(
            f"{error}; kv_memory of {format_size(whole.num_bytes)} is divided between the model "
            f"({format_size(whole.num_bytes - draft_bytes)}) and the draft model {draft.model} "
            f"({format_size(draft_bytes)}); raise it, or leave the draft model out - in `speculation`"
        ) from error
