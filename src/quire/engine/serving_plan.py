"""`plan`: the memory and the capacity of a model's engine, before any weight is loaded; a start uses it too.

    weights   in their final formats (`quire.model.weight_sizes`)
    tokenizer by the counts of its words and merges (`quire.weights.tokenizer`)
    kv        keys and values of the requests, by kind of layer
    scores    log probabilities of tokens, kept where requests ask for them
    states    states of the requests
    tiers     the host cache
    scratch   memory of a step: activations of its tokens, logits
    runtime   Python, torch, transformers and this model's code in this process; on a card what its context takes
    host      on a card: the parts that stay in this machine's memory

It reads config and headers, makes a model without memory, and uses the allocator's own arithmetic (`kv_capacity`):
blocks, their padding, state slots, the budget of `kv_memory` from the memory that the weights leave free. `Plan.fits`
is the verdict of a start with the same options. A start that fails for lack of memory has the plan's lines as notes of
its error.

A draft model (`speculation="model:PATH"`) has rows of its own in weights, tokenizer and kv, and a part of `kv_memory`.

On a device with memory of its own (`plan_device`) these rows are of that memory, and the tokenizer and the process are
rows of the host, which `total_bytes` leaves out. For a card of known bandwidth `decode_bound` bounds tokens per second.

Not a promise of speed. Not known ahead: memory that other processes take meanwhile.

Cost: importing torch and transformers; then 0.05 to 0.6 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cache.block_counts import blocks_with_prefix
from quire.config import EngineConfig, draft_model_of
from quire.engine.cluster_plan import ClusterPlan, cluster_plan
from quire.engine.decode_bound import DecodeBound, decode_bound
from quire.engine.draft_memory import (
    check_rewinds,
    divide_memory,
    draft_config,
    errors_of_draft,
    with_possible_drafts,
)
from quire.engine.kv_capacity import KVFit, KVLayout, fit_within, kv_layout, kv_memory_for
from quire.engine.plan_device import PlanDevice, plan_device
from quire.errors import ArgumentError, CapacityError, QuireError
from quire.sizes import format_size, parse_budget, parse_size
from quire.spec import KVGroup, KVSpec
from quire.spec.kv_dtype import with_kv_dtype
from quire.spec.score_payload import BYTES_PER_SCORE

if TYPE_CHECKING:
    from quire.model.support import Support
    from quire.weights.load import UnloadedModel

__all__ = ["Plan", "PlanRow", "plan", "refuse_if_none_fits", "require_room"]

_HOST = "host"  # the part of rows that a device's memory does not hold

_WEIGHTS = {
    "codes": "in codes",
    "linear": "linear layers, packed",
    "experts": "experts, packed",
    "latents": "latent heads, packed",
    "embeddings": "embeddings",
    "dense": "norms and others, dense",
}
_DEVICE_WEIGHTS = {  # outside of this machine's memory, where dense experts are no kind of their own
    "codes": "in codes",
    "experts": "experts, in codes",
    "linear": "linear layers",
    "latents": "latent heads",
    "embeddings": "embeddings",
    "dense": "norms and others",
}
# Threads, buffers of the kernels, the rest of the proof; and more if attention has partial sums.
_ENGINE_BYTES, _LONG_PROMPT_BYTES = 17 << 20, 19 << 20
# Pages of torch, `tokenizers` and the kernels that serving reads; and if torch computes in layers.
_CODE_BYTES, _CODE_BYTES_IN_LAYERS = 22 << 20, 30 << 20
# Parts that a thread quantizes, in the C library's heap, which an ended thread leaves: two in turn.
_ROUNDING_BYTES = 8 << 20
_COPIES = 4  # of a layer's outputs, where torch computes between the products
# Tokens of a partial sum, if several threads compute a row (native/kernels/attention_kernel.hpp).
_PARTIAL_TOKENS = 512


@dataclass(frozen=True)
class PlanRow:
    """part: weights, tokenizer, kv, scores, states, tiers, scratch, runtime or host. name: a piece of it. note: its
    origin."""

    part: str
    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The memory and capacity of a start with these options; bytes are integers, lengths are tokens.

    Attributes:
        model, model_type, dtype, kv_dtype, storage, block_size: of the start (block_size 1: blocks are not of tokens).
        device: the device that holds and computes all this; device_title: for people, empty for this machine.
        rows: the parts of `total_bytes`, and those of the host next to a card.
        context, concurrency, shared_prefix: the requests of the rows: those asked for, or the most that fit.
        max_context: of each of `concurrency` requests; 0: not one token. max_concurrency: requests of `context`.
        fits: True if they fit. reason: why they do not.
        memory_bytes: all memory for the process: `memory`, or its present memory and the free memory; or the card's.
        budget_bytes: for keys, values and states by `kv_memory`. needed_bytes: the requests' need of it.
        draft_bytes: for the keys and values of a draft model by `kv_memory`, next to `budget_bytes`; 0 without one.
        num_blocks, num_state_slots: of that budget.
        decode_bound: the most tokens a second that these requests get; None unless they fit on a card whose bandwidth
            is known.
        support: the level of proof of the model's type and of each format of its weights.
        cluster: what several such engines hold, and their store; None for one engine without a store.
    """

    model: str
    model_type: str
    dtype: str
    kv_dtype: str
    storage: str
    block_size: int
    device: str
    device_title: str
    context: int
    concurrency: int
    shared_prefix: int
    fits: bool
    reason: str
    max_context: int
    max_concurrency: int
    memory_bytes: int
    budget_bytes: int
    needed_bytes: int
    num_blocks: int
    num_state_slots: int
    draft_bytes: int
    decode_bound: DecodeBound | None
    rows: tuple[PlanRow, ...] = field(repr=False)
    support: tuple[Support, ...] = field(repr=False)
    cluster: ClusterPlan | None = None

    def num_bytes(self, part: str) -> int:
        """Bytes of all rows of a part."""
        return sum(row.num_bytes for row in self.rows if row.part == part)

    @property
    def total_bytes(self) -> int:
        """Bytes of the process, or of the card, with these requests."""
        return sum(row.num_bytes for row in self.rows if row.part != _HOST)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and `total_bytes`."""
        return {**asdict(self), "total_bytes": self.total_bytes}

    def lines(self) -> list[str]:
        """The rows as a table, the verdict, and the reason if the requests do not fit."""
        total = PlanRow("total", "", self.total_bytes, f"of {format_size(self.memory_bytes)}")
        rows = sorted((*self.rows, total), key=lambda row: row.part == _HOST)
        shown = [(row.part, row.name, format_size(row.num_bytes), row.note) for row in rows]
        widths = [max(len(row[column]) for row in shown) for column in range(3)]
        kept = f", K and V in {self.kv_dtype}" * (self.kv_dtype != self.dtype)
        where = f", on {self.device_title}" * bool(self.device_title)
        lines = [f"{self.model} ({self.model_type}), {self.dtype}{kept}, storage {self.storage}{where}"]
        before = ""
        for part, name, size, note in shown:
            first = part if part != before else ""
            before = part
            cells = f"{first:{widths[0]}}  {name:{widths[1]}}  {size:>{widths[2]}}  {note}"
            lines.append(cells.rstrip())
        lines += [
            f"{'' if number else 'support':{widths[0]}}  {support}"
            for number, support in enumerate(self.support)
        ]
        lines.append(
            f"kv_memory {format_size(self.budget_bytes)}: {self.num_blocks} blocks"
            + (f", {self.num_state_slots} states" * bool(self.num_state_slots))
            + (f", next to the draft model's {format_size(self.draft_bytes)}" * bool(self.draft_bytes))
            + f"; {self.requests} need {format_size(self.needed_bytes)}"
        )
        lines.append(self.verdict)
        if self.decode_bound is not None:
            lines.append(str(self.decode_bound))
        if self.cluster is not None:
            lines += self.cluster.lines(self.context, self.shared_prefix)
        if self.reason:
            lines.append(f"why: {self.reason}")
        return lines

    @property
    def requests(self) -> str:
        """The plan's requests, in words."""
        shared = f" (the first {self.shared_prefix} shared)" * bool(self.shared_prefix)
        return f"{self.concurrency} request{'s' * (self.concurrency != 1)} of {self.context} tokens{shared}"

    @property
    def verdict(self) -> str:
        """The verdict, and the most that fits, in one line."""
        ways = (self.max_concurrency, self.context), (self.concurrency, self.max_context)
        most = ", or ".join(dict.fromkeys(f"{number} of {length} tokens" for number, length in ways))
        if self.fits:
            return f"fits: {self.requests}; the most: {most}"
        return f"does not fit: {self.requests}; the most: {most}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def plan(
    model: Any = None,
    *,
    context: int | None = None,
    concurrency: int | None = None,
    shared_prefix: int = 0,
    memory: str | int | None = None,
    device: str | None = None,
    kv_dtype: str | Mapping[str | int, str] | None = None,
    weights: str | None = None,
    replicas: int = 1,
    store: str | int | None = None,
    **options: Any,
) -> Plan:
    """The memory and capacity of an engine of `model` with these options, before anything is loaded.

    Args:
        model: None (the embedded one), a folder (config.json is enough), a GGUF file, a Hub id in the local cache.
        context: tokens of a request, prompt and answer together; the most that fits if not given.
        concurrency: requests at once, over all replicas; the most that fit if not given.
        shared_prefix: tokens at the beginning that all of them have in common.
        memory: memory of the machine or container, in place of the free memory of this process.
        device: a graphics card such as "h100" (`quire.spec.cards`), which need not be there; one by its sizes, such as
            "mine:40GiB" or "mine:40GiB:1.5TB/s"; "cuda" or "cuda:1", this machine's card; None or "cpu": this machine.
        kv_dtype, weights: as of `LLM`.
        replicas: engines as this one, each with such memory or such a card; the rows are those of one.
        store: memory of a tier that all of them share.
        options: as of `LLM` (`config=`: all of them at once).

    Raises:
        ArgumentError: a wrong option, an unknown format, or one that the device does not run. BackendError: this
        machine has no such card. LoadError, ConfigError, UnsupportedModelError: the model, as far as its config and
        headers tell.
    """
    config = EngineConfig.from_arguments(model, options)
    forms = {"kv_dtype": kv_dtype, "weights": weights}
    config = replace(config, **{name: value for name, value in forms.items() if value is not None})
    for name, value, minimum in (
        ("context", context, 1),
        ("concurrency", concurrency, 1),
        ("shared_prefix", shared_prefix, 0),
        ("replicas", replicas, 1),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
            raise ArgumentError(f"expected an integer of at least {minimum}, got {value!r} - in `{name}`")
    if context is not None and shared_prefix >= context:
        raise ArgumentError(
            f"expected fewer tokens than context {context}, got {shared_prefix} - in `shared_prefix`"
        )
    if config.model is not None and not isinstance(config.model, str | Path):
        raise ArgumentError(
            f"expected a model as None, folder, GGUF file or Hub id to plan for, got {type(config.model).__name__} - "
            "in `model`"
        )

    config, place = plan_device(config, device)
    if memory is not None and not place.is_host:
        raise ArgumentError(
            f"expected no memory of this machine for a plan on device {place.name!r}, got {memory!r}; give the card's "
            "size as mine:40GiB - in `memory`"
        )
    unloaded = _unloaded(config)
    place.require(config, unloaded)
    draft = _unloaded_draft(config)
    if (ours := draft_config(config)) is not None and draft is not None:
        place.require(ours, draft)
    store_bytes = 0 if store is None else parse_size(store, where="store")
    of_each = None if concurrency is None else -(-concurrency // replicas)
    found = _plan_of(config, unloaded, draft, context, of_each, shared_prefix, memory, place)
    if replicas == 1 and not store_bytes:
        return found
    spec = with_kv_dtype(unloaded.spec, config.kv_dtype)
    cluster = cluster_plan(
        kv_layout(found.storage, config, spec, found.context),
        num_replicas=replicas,
        context=found.context,
        shared_prefix=found.shared_prefix,
        max_concurrency=found.max_concurrency,
        weights_bytes=found.num_bytes("weights"),
        kv_bytes=found.budget_bytes + found.draft_bytes,
        total_bytes=found.total_bytes,
        store_bytes=store_bytes,
    )
    return replace(found, cluster=cluster)


def require_room(config: EngineConfig) -> None:
    """Checks, before a start with a given length or size loads, that there will be room.

    *raises:* CapacityError, ArgumentError: as the start would once all is loaded; the plan's lines are its notes.
    """
    is_of_files = config.model is None or isinstance(config.model, str | Path)
    is_explicit = isinstance(parse_budget(config.kv_memory, where="kv_memory"), int)
    if not is_of_files or not (is_explicit or config.max_model_len is not None):
        return
    try:
        unloaded, draft = _unloaded(config), _unloaded_draft(config)
    except QuireError:
        return  # `load` raises it, or fetches missing files
    config, place = plan_device(config, None)
    found = _plan_of(config, unloaded, draft, config.max_model_len, None, 0, None, place)
    if not found.fits:
        raise _refusal(found, config)


def refuse_if_none_fits(fit: KVFit, config: EngineConfig, max_model_len: int, draft_bytes: int = 0) -> None:
    """The same check once all is loaded. draft_bytes: of `kv_memory` for a draft model.

    *raises:* CapacityError: no request of the given length fits.
    """
    if (reason := _why_not(fit, config, max_model_len, draft_bytes)) is not None:
        raise CapacityError(reason)


def _refusal(found: Plan, config: EngineConfig) -> QuireError:
    if config.max_model_len is None and found.memory_bytes > found.total_bytes:
        return ArgumentError(found.reason)  # of `kv_memory` alone
    error = CapacityError(found.reason)
    for line in found.lines()[:-1]:  # the last one is the error's
        error.add_note(line)
    return error


def _why_not(fit: KVFit, config: EngineConfig, max_model_len: int, draft_bytes: int) -> str | None:
    """Why a start is refused, for plan and start alike: one request of the given length must fit."""
    if config.max_model_len is None or fit.max_num_sequences(max_model_len) >= 1:
        return None
    layout, most = fit.layout, fit.max_num_tokens(1, max_model_len)
    needed = kv_memory_for(layout, layout.num_blocks(max_model_len), 1, fit.num_draft_slots)
    return (
        f"expected a KV cache that holds a request of max_model_len {max_model_len} tokens, which needs "
        f"{format_size(needed)}, got one of {format_size(fit.num_bytes)} ({fit.num_blocks} "
        f"{layout.block_name}s){_next_to_draft(config, draft_bytes)}, which holds {most} tokens; raise kv_memory or "
        f"lower max_model_len to at most {most} - in `max_model_len`"
    )


def _next_to_draft(config: EngineConfig, draft_bytes: int) -> str:
    """For a message about the model's part of `kv_memory`; "" without a draft model."""
    if not draft_bytes:
        return ""
    return f" next to {format_size(draft_bytes)} of the draft model {draft_model_of(config.speculation)}"


# -- internals -------------------------------------------------------------------------------------------------


def _unloaded(config: EngineConfig) -> UnloadedModel:
    from quire.weights.load import without_weights

    return without_weights(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        is_dense=config.weight_formats is not None,
    )


def _unloaded_draft(config: EngineConfig) -> UnloadedModel | None:
    ours = draft_config(config)
    if ours is None:
        return None
    with errors_of_draft():
        return _unloaded(ours)


def _plan_of(
    config: EngineConfig,
    unloaded: UnloadedModel,
    draft: UnloadedModel | None,
    context: int | None,
    concurrency: int | None,
    shared_prefix: int,
    memory: str | int | None,
    place: PlanDevice,
) -> Plan:
    from quire.engine.open_storage import storage_of
    from quire.model.prepare import resolve_length
    from quire.model.support import runs_by_own_forward

    spec = with_kv_dtype(unloaded.spec, config.kv_dtype)
    if context is not None:
        if config.max_model_len is not None and context > config.max_model_len:
            raise ArgumentError(
                f"expected a context within max_model_len {config.max_model_len}, got {context} - in `context`"
            )
        config = replace(config, max_model_len=max(2, context))
    try:
        max_model_len = resolve_length(unloaded, config.max_model_len)
    except ArgumentError as error:
        if context is None:
            raise
        raise ArgumentError(_with_context(str(error))) from error
    config = with_possible_drafts(config, runs_by_own_forward(unloaded.model_type))
    storage = storage_of(config, spec) if place.is_present else "paged"
    layout = kv_layout(storage, config, spec, max_model_len)
    weights, tokenizers = _weight_rows(config, unloaded, place), _tokenizer_rows(unloaded)
    if (ours := draft_config(config)) is not None and draft is not None:
        check_rewinds(ours, draft.spec, runs_by_own_forward(draft.model_type))
        weights += _of_draft(_weight_rows(ours, draft, place))
        tokenizers += _of_draft(_tokenizer_rows(draft))
    process = [
        *tokenizers,
        PlanRow("runtime", "python, torch, transformers", _process_bytes(), "this process after its imports"),
    ]
    free_bytes, memory_bytes, loaded = place.free_bytes, place.total_bytes, weights
    if place.is_host:
        loaded = [*weights, *process[:-1]]
        runtime_bytes = process[-1].num_bytes
        if memory is not None:
            free_bytes = max(0, parse_size(memory, where="memory") - runtime_bytes)
        memory_bytes = free_bytes + runtime_bytes
    loaded_bytes = sum(row.num_bytes for row in loaded)
    left_bytes = free_bytes - loaded_bytes
    fit, draft_fit, reason = _fit(config, layout, max_model_len, draft, left_bytes, loaded_bytes, place)
    draft_bytes = 0 if draft_fit is None else draft_fit.num_bytes

    asked = context or max_model_len
    if fit is None:
        max_concurrency = max_context = 0
    else:
        if context is None:
            # As in a start: a request of the model's own length need not fit.
            asked = max(1, fit.max_num_tokens(concurrency or 1, max_model_len, shared_prefix))
        shared_prefix = min(shared_prefix, asked - 1)
        max_concurrency = min(fit.max_num_sequences(asked, shared_prefix), config.max_num_seqs)
        wanted = concurrency or max(1, max_concurrency)
        max_context = (
            fit.max_num_tokens(wanted, unloaded.max_model_len, shared_prefix)
            if wanted <= config.max_num_seqs
            else 0
        )
    wanted = concurrency or max(1, max_concurrency)
    fits = fit is not None and max_concurrency >= wanted
    needed_blocks = layout.num_blocks(asked, wanted, shared_prefix)
    num_slots = (wanted + bool(shared_prefix)) if spec.states else 0
    num_draft_slots = 0 if fit is None else fit.num_draft_slots
    needed_bytes = kv_memory_for(layout, needed_blocks, num_slots, num_draft_slots)
    spare_bytes = 0 if fit is None else max(0, fit.num_bytes - needed_bytes)
    of_prompts = _prompt_rows(config, layout, asked, wanted, spare_bytes)
    spare_bytes -= sum(row.num_bytes for row in of_prompts)
    if fit is not None and not fits:
        reason = _why_not(fit, config, max_model_len, draft_bytes) or _why_so_few(
            fit, config, wanted, needed_bytes, draft_bytes
        )
    return Plan(
        model=unloaded.name,
        model_type=unloaded.model_type,
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype_by_layers,
        storage=layout.storage,
        block_size=layout.block_size,
        device=place.name,
        device_title="" if place.is_host else place.title,
        context=asked,
        concurrency=wanted,
        shared_prefix=shared_prefix,
        fits=fits,
        reason="" if fits else reason if context is None else _with_context(reason),
        max_context=max_context,
        max_concurrency=max_concurrency,
        memory_bytes=memory_bytes,
        budget_bytes=0 if fit is None else fit.kv_bytes + fit.state_bytes,
        needed_bytes=needed_bytes,
        num_blocks=0 if fit is None else fit.num_blocks,
        num_state_slots=0 if fit is None else fit.num_state_slots,
        draft_bytes=draft_bytes,
        decode_bound=_decode_bound(config, unloaded, spec, place, asked, wanted, shared_prefix)
        if fits
        else None,
        rows=(
            *loaded,
            *_kv_rows(layout, asked, wanted, shared_prefix),
            *of_prompts,
            *_draft_kv_rows(draft_fit, draft, asked, wanted, shared_prefix),
            *(_score_rows(config, layout, asked, wanted, shared_prefix) if place.is_host else ()),
            *_state_rows(config, spec, num_slots, num_draft_slots, asked, wanted, spare_bytes),
            *_tier_rows(config, place),
            *_scratch_rows(config, unloaded, asked, wanted, place),
            *_process_rows(process, place),
        ),
        support=_support_of(config, unloaded, spec),
    )


def _with_context(message: str) -> str:
    """A message about `max_model_len` for a caller that gave it as `context`."""
    return message.replace("max_model_len", "context")


def _support_of(config: EngineConfig, unloaded: UnloadedModel, spec: KVSpec) -> tuple[Support, ...]:
    """The support of the model's type, and of the formats of its weights, saved and quantized."""
    from quire.model.support import family_support, weight_support

    forms = [*(unloaded.weight_forms or (spec.dtype,))]
    if (formats := config.weight_formats) is not None:
        roundings = [*(rounding for _, rounding in formats.by_pattern), formats.head]
        forms += map(str, filter(None, roundings))
    return (family_support(unloaded.model_type), *(weight_support(form) for form in dict.fromkeys(forms)))


def _fit(
    config: EngineConfig,
    layout: KVLayout,
    max_model_len: int,
    draft: UnloadedModel | None,
    left_bytes: int,
    loaded_bytes: int,
    place: PlanDevice,
) -> tuple[KVFit | None, KVFit | None, str]:
    """The capacity of the model, that of its draft model if it has one, and why there is none."""
    from quire.model.prepare import resolve_length

    if left_bytes < 0:
        free = format_size(left_bytes + loaded_bytes)
        parts, where = (
            ("weights and tokenizer", "to this process") if place.is_host else ("weights", f"on {place.name}")
        )
        of_draft = f", the draft model {draft.name} included," if draft is not None else ""
        reason = (
            f"expected memory for {parts} of {format_size(loaded_bytes)}{of_draft}, got {free} free {where}"
        )
        return None, None, reason
    ours, draft_fit = draft_config(config), None
    try:
        if ours is None or draft is None:
            fit = fit_within(config, layout, max_model_len, left_bytes)
        else:
            length = resolve_length(draft, ours.max_model_len)
            divided = divide_memory(config, layout, max_model_len, ours, draft.spec, length, left_bytes)
            fit, draft_fit = divided.fit, divided.draft_fit
    except (ArgumentError, CapacityError) as error:
        return None, None, str(error)
    # Elsewhere blocks and state slots take their memory at once, so they exchange none.
    return (fit if place.is_elastic else replace(fit, exchange_bytes=0)), draft_fit, ""


def _why_so_few(fit: KVFit, config: EngineConfig, wanted: int, needed_bytes: int, draft_bytes: int) -> str:
    if wanted > config.max_num_seqs:
        return f"max_num_seqs is {config.max_num_seqs}"
    held = f"{fit.num_blocks} {fit.layout.block_name}s"
    if fit.exchange_bytes:
        held = f"{fit.layout.block_name}s, and states of {format_size(fit.layout.spec.bytes_per_state)}"
    beside = _next_to_draft(config, draft_bytes)
    return f"{format_size(needed_bytes)} needed, kv_memory is {format_size(fit.num_bytes)} ({held}){beside}"


def _of_draft(rows: list[PlanRow]) -> list[PlanRow]:
    return [replace(row, name=f"draft model: {row.name}") for row in rows]


def _draft_kv_rows(
    fit: KVFit | None, draft: UnloadedModel | None, context: int, concurrency: int, shared_prefix: int
) -> list[PlanRow]:
    """Bytes of the draft model for the requests; those for which its memory does not suffice have no drafts."""
    if fit is None or draft is None:
        return []
    num_tokens = min(context, draft.max_model_len)
    num_shared = min(shared_prefix, num_tokens - 1)
    num_texts = min(concurrency, fit.max_num_sequences(num_tokens, num_shared))
    return _of_draft(_kv_rows(fit.layout, num_tokens, num_texts, num_shared))


def _weight_rows(config: EngineConfig, unloaded: UnloadedModel, place: PlanDevice) -> list[PlanRow]:
    from quire.model.weight_sizes import planned_weights

    sizes = planned_weights(
        unloaded.model,
        packing=place.packing,
        form_of=_rounded_forms(config, unloaded).get,
        codes=unloaded.codes,
        backend=place.backend,
    )
    names = _WEIGHTS if place.is_host else _DEVICE_WEIGHTS
    has_dense_experts = unloaded.has_experts and all(size.kind != "experts" for size in sizes)
    if has_dense_experts and not place.is_host:
        names = names | {"dense": "experts, norms and others"}
    return [
        PlanRow(
            "weights",
            ", ".join(filter(None, (names[row.kind], row.label))),
            row.num_bytes,
            f"{row.num_tensors} tensors",
        )
        for row in sizes
    ]


def _rounded_forms(config: EngineConfig, unloaded: UnloadedModel) -> dict[str, str]:
    """The formats of the parameters that will be rounded, by name."""
    from quire.weights.quantized_modules import planned_forms

    formats = config.weight_formats
    return {} if formats is None else planned_forms(unloaded.model, formats)


def _decode_bound(
    config: EngineConfig,
    unloaded: UnloadedModel,
    spec: KVSpec,
    place: PlanDevice,
    context: int,
    concurrency: int,
    shared_prefix: int,
) -> DecodeBound | None:
    from quire.model.weight_sizes import quantized_bytes

    if place.card is None or config.speculation != "off":  # drafts have a step give more tokens than one
        return None
    forms = _rounded_forms(config, unloaded)
    coded = quantized_bytes(unloaded.model, forms, unloaded.codes, place.backend)
    return decode_bound(unloaded, spec, place.card, context, concurrency, shared_prefix, coded)


def _tokenizer_rows(unloaded: UnloadedModel) -> list[PlanRow]:
    if (words := unloaded.vocabulary) is None:
        return []
    return [PlanRow("tokenizer", "words and merges", words.num_bytes, words.label)]


def _kv_rows(layout: KVLayout, context: int, concurrency: int, shared_prefix: int) -> list[PlanRow]:
    """Bytes of the requests by kind of layer, padding included."""
    spec = layout.spec
    if not spec.stores_kv:
        num_blocks = layout.num_blocks(context, concurrency, shared_prefix)
        return [PlanRow("kv", "tokens", 0, f"{num_blocks} blocks that hold nothing")]
    if not layout.shares_blocks:
        num_blocks = layout.num_blocks(context, concurrency)
        note = f"{num_blocks} {layout.block_name}s of {format_size(layout.block_bytes)}, nothing is shared"
        return [PlanRow("kv", "all layers", num_blocks * layout.block_bytes, note)]
    kinds: dict[str, list[KVGroup]] = {}
    for group in spec.groups:
        name = "full attention" if group.span.kind == "full" else f"{group.span.kind} of {group.span.size}"
        name = f"latents, {name}" if group.latent else name
        if " and " in spec.kv_dtype:
            name += f", {group.layer.kv_dtype(spec.dtype)}"
        kinds.setdefault(name, []).append(group)
    rows = []
    for name, groups in kinds.items():
        once, each = blocks_with_prefix(groups, context, shared_prefix, layout.block_size)
        num_blocks = once + concurrency * each
        used = sum(group.bytes_per_block(layout.block_size) for group in groups) / len(groups)
        padding = 1 - used / layout.block_bytes
        size = groups[0].tokens_per_block(layout.block_size)
        note = f"{sum(len(group.layers) for group in groups)} layers, {num_blocks} blocks of {size} tokens"
        if once and shared_prefix:
            note += f", {once} of them shared"
        if padding >= 0.0005:
            note += f", {padding:.1%} padding"
        rows.append(PlanRow("kv", name, num_blocks * layout.block_bytes, note))
    return rows


def _score_rows(
    config: EngineConfig, layout: KVLayout, context: int, concurrency: int, shared_prefix: int
) -> list[PlanRow]:
    """Bytes of the kept scores of all tokens."""
    if not (config.keep_scores and config.shares_prefixes and layout.shares_blocks):
        return []
    num_tokens = concurrency * (context - shared_prefix) + shared_prefix
    return [PlanRow("scores", "of tokens", BYTES_PER_SCORE * num_tokens, "at most, if requests ask for them")]


def _tier_rows(config: EngineConfig, place: PlanDevice) -> list[PlanRow]:
    """Bytes of the tier in this machine's memory, beside a card too."""
    if config.host_cache is None:
        return []
    num_bytes = parse_size(config.host_cache, where="host_cache")
    part = "tiers" if place.is_host else _HOST
    return [PlanRow(part, "host cache", num_bytes, "at most, for evicted prefixes")]


def _prompt_rows(
    config: EngineConfig, layout: KVLayout, context: int, concurrency: int, spare_bytes: int
) -> list[PlanRow]:
    """Bytes of layers with windows while prompts are computed: a step's tokens beyond the windows."""
    forgetting = [group for group in layout.spec.groups if group.span.kind != "full"]
    if not forgetting or not layout.shares_blocks:
        return []
    chunk = min(config.max_batch_tokens, context)
    num_prompts = min(concurrency, max(1, config.max_batch_tokens // context))
    more = 0
    for group in forgetting:
        tokens = group.tokens_per_block(layout.block_size)
        _, alone = blocks_with_prefix([group], context, 0, layout.block_size)
        during = min(-(-context // tokens), -(-(group.span.max_num_kept + chunk - 1) // tokens) + 1)
        more += num_prompts * max(0, during - alone)
    num_blocks = min(more, spare_bytes // layout.block_bytes)
    if not num_blocks:
        return []
    note = f"{num_blocks} blocks of prompts before their windows move on"
    return [PlanRow("kv", "prompts of a step", num_blocks * layout.block_bytes, note)]


def _state_rows(
    config: EngineConfig,
    spec: KVSpec,
    num_slots: int,
    num_draft_slots: int,
    context: int,
    concurrency: int,
    spare_bytes: int,
) -> list[PlanRow]:
    if not spec.states:
        return []
    each = spec.bytes_per_state
    rows = [PlanRow("states", "state slots", num_slots * each, f"{num_slots} of {format_size(each)}")]
    if num_draft_slots:
        note = f"{num_draft_slots} of {format_size(each)}, behind the drafts of a step"
        rows.append(PlanRow("states", "draft slots", num_draft_slots * each, note))
    every = context // config.checkpoint_every if config.checkpoint_every else 0
    # There are always two slots.
    spare_slots = max(0, 2 - num_slots) + spare_bytes // each
    if config.prefix_caching and (num_kept := min(spare_slots, concurrency * (1 + every))):
        note = f"{num_kept} of {format_size(each)}, given up when slots are short"
        rows.append(PlanRow("states", "checkpoints", num_kept * each, note))
    return rows


def _process_rows(process: list[PlanRow], place: PlanDevice) -> list[PlanRow]:
    """The process itself; with a device of its own memory what is in use there, and the rows of this machine."""
    if place.is_host:
        return process[-1:]
    note = "in use now, with room for a step" if place.is_present else "reserved"
    return [
        PlanRow("runtime", "context, libraries' code", place.used_bytes, note),
        *(replace(row, part=_HOST) for row in process),
    ]


def _scratch_rows(
    config: EngineConfig, unloaded: UnloadedModel, context: int, concurrency: int, place: PlanDevice
) -> list[PlanRow]:
    """Memory of a step, measured for models of ten kinds and rounded up; no allocator limits it (docs/plan.md)."""
    from quire.model.weight_sizes import outputs_per_token

    spec = unloaded.spec
    num_tokens = min(config.max_batch_tokens, context * concurrency)
    num_rows = min(concurrency, config.max_num_seqs, num_tokens)
    is_plain = (
        place.is_host
        and not spec.states
        and not any(layer.latent for layer in spec.layers)
        and not unloaded.has_experts
    )
    copies = 1 if is_plain else _COPIES
    code_bytes = _CODE_BYTES if is_plain else _CODE_BYTES_IN_LAYERS
    step_bytes = num_tokens * outputs_per_token(unloaded.model) * spec.dtype_bytes * copies
    partial_bytes = _partial_bytes(unloaded, num_tokens, context) if place.is_native else 0
    engine_bytes = _ENGINE_BYTES + (_LONG_PROMPT_BYTES if partial_bytes else 0)
    # In the model's dtype, and in float32 for sampling.
    logits_bytes = num_rows * unloaded.vocab_size * (spec.dtype_bytes + 4)
    layers = PlanRow("scratch", "attention and layers", step_bytes, f"about, a step of {num_tokens} tokens")
    logits = PlanRow("scratch", "logits", logits_bytes, f"{num_rows} rows of {unloaded.vocab_size}")
    if not place.is_host:
        return [layers, logits]
    return [
        layers,
        PlanRow(
            "scratch", "attention's partial sums", partial_bytes, f"at most, prompts of {context} tokens"
        ),
        logits,
        PlanRow("scratch", "engine and kernels", engine_bytes, "about, measured"),
        PlanRow("scratch", "libraries' code", code_bytes, "about, measured: what serving reads of it"),
        *_rounding_rows(config),
    ]


def _rounding_rows(config: EngineConfig) -> list[PlanRow]:
    """The memory that quantizing leaves: the C library keeps the end of an ended thread's heap."""
    import torch

    num_threads = torch.get_num_threads()
    if config.weight_formats is None or not config.weight_formats.has_rounding or num_threads < 2:
        return []
    note = f"about, measured: heaps of {num_threads} threads"
    return [PlanRow("scratch", "rounding", num_threads * _ROUNDING_BYTES, note)]


def _partial_bytes(unloaded: UnloadedModel, num_tokens: int, context: int) -> int:
    """Bytes of the kernels' partial sums of a step's rows: for each head and each partial a result, a largest score and
    a sum, in float32. Rows with one partial have none."""
    text: Any = unloaded.model.config.get_text_config(decoder=True)
    num_heads, most = getattr(text, "num_attention_heads", None) or 0, 0
    if not isinstance(num_heads, int):  # of each layer
        num_heads = max(num_heads)
    for group in unloaded.spec.groups if unloaded.spec.stores_kv else ():
        num_partials = -(-group.span.num_kept(context) // _PARTIAL_TOKENS)
        if num_partials > 1:
            most = max(most, num_partials * ((group.v_head_dim or group.k_head_dim) + 2) * 4)
    return num_tokens * num_heads * most


def _process_bytes() -> int:
    """Proportional resident bytes of this process; 0 without smaps_rollup."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
