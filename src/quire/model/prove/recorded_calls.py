"""Calls of the model's own modules, recorded in its own forward, which can be repeated in other ways.

A norm or an MLP is tested on rows; an attention or a whole layer needs its surroundings: position embeddings, mask, and
keys and values of the tokens before. `record` runs the model's own forward (eager attention, working type) up to the
last of the given modules, and records each one's call of the last `NUM_ROWS` rows:

    near    over `NUM_TOKENS` tokens of a text (random ids without a tokenizer): activations of the model itself
    far     at positions beyond every window and up to `NUM_TOKENS`, over random keys and values

`module_output` repeats a call by the module's own forward. `PagedCall` has a kernel repeat it over paged memory: the
same tokens before it, NaN in every other slot.

Cost: two forwards of the layers up to the last recorded one; memory for its keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from quire.attention import attention_batch
from quire.devices import Device
from quire.memory.paged import PagedStorage
from quire.model.cache_keyword import CACHE_KEYWORDS
from quire.model.paged_cache import PagedCache, empty_model_cache, model_cache_class, rows_to_store
from quire.model.prove.model import ModelToProve
from quire.model.prove.text import TEXT
from quire.modules.error_bounds import NUM_ROWS, row_parts
from quire.spec import KVSpec, LayerSpec
from quire.step import ForwardStep

__all__ = ["Call", "Calls", "PagedCall", "module_output", "record", "text_tokens"]

NUM_TOKENS = 512
_BLOCK_SIZE = 16
_AROUND = 8  # rows beyond a window


@dataclass(frozen=True, eq=False)
class Call:
    """A call of up to `NUM_ROWS` rows.

    Args:
        hidden: [1, rows, width].
        keywords: its other arguments, without the cache.
        cache_keyword: its keyword for the cache; None for a module without one.
        past: K [1, heads, n, k_head_dim] and V of the n tokens before the first row; for a latent layer the latents,
            and their rotated parts.
        start: position of the first row.
        layer: number of the layer that stores its K and V; None for no layer.
    """

    hidden: torch.Tensor
    keywords: dict[str, Any]
    cache_keyword: str | None
    past: tuple[torch.Tensor, torch.Tensor] | None
    start: int
    layer: int | None

    @property
    def parts(self) -> list[slice]:
        """Its rows, in the parts that a proof calls separately."""
        return row_parts(self.hidden.shape[1])

    def to_dtype(self, dtype: torch.dtype, hidden: torch.Tensor | None = None) -> Call:
        """The call in another type, optionally with other rows."""
        return Call(
            (self.hidden if hidden is None else hidden).to(dtype),
            {name: _cast(value, dtype) for name, value in self.keywords.items()},
            self.cache_keyword,
            None if self.past is None else (self.past[0].to(dtype), self.past[1].to(dtype)),
            self.start,
            self.layer,
        )


Calls = dict[nn.Module, Call]


def module_output(module: nn.Module, call: Call) -> torch.Tensor | None:
    """Output [1, rows, width] of the module's own forward; None if the output has another form, or if the module does
    not store its K and V exactly once, in its own layer."""
    keywords = dict(call.keywords)
    past = None
    if call.cache_keyword is not None and call.past is not None:
        past = keywords[call.cache_keyword] = _ReplayCache(call.past, call.start)
    with torch.inference_mode():
        answer = module.forward(**keywords, hidden_states=call.hidden)
    if past is not None and past.updated != [call.layer]:
        return None
    if isinstance(answer, tuple):
        answer = answer[0] if 1 <= len(answer) <= 2 else None
    return answer if isinstance(answer, torch.Tensor) else None


class PagedCall:
    """Paged memory of one layer that has the tokens before a call; NaN everywhere else.

    number: layer number that the module passes to the cache. device: writes and attends, in its own memory.
    """

    def __init__(
        self, call: Call, layer: LayerSpec, dtype: torch.dtype, device: Device, number: int = 0
    ) -> None:
        assert call.past is not None
        # The layers before it share its memory, so they store nothing of their own.
        others = (replace(layer, shares_kv_with=number),) * number
        spec = KVSpec((*others, layer), str(dtype).removeprefix("torch."))
        num_blocks = -(-(call.start + call.hidden.shape[1]) // _BLOCK_SIZE)
        self._storage = PagedStorage(spec, num_blocks, _BLOCK_SIZE, max_blocks=num_blocks, device=device)
        self._storage.fill(float("nan"))
        self._blocks = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32)  # an order that hides no fault
        k, v = call.past
        if k.shape[2]:
            positions = torch.arange(call.start - k.shape[2], call.start)
            slots = self._slots(positions)
            device.write(self._storage.view(number), *rows_to_store(layer, k, v), device.to_device(slots))
        self.cache = PagedCache(spec, self._storage, device, "proof")
        self._device = device
        self._call = call

    def __enter__(self) -> PagedCall:
        return self

    def __exit__(self, *error: object) -> None:
        self.cache.close()
        self._storage.close()

    def steps(self) -> Iterator[slice]:
        """The rows of the call, part by part; within each the cache is in that part's step."""
        for part in self._call.parts:
            positions = self._call.start + torch.arange(part.start, part.stop)
            plan = attention_batch(
                [0, positions.numel()], [int(positions[-1]) + 1], self._blocks[None], _BLOCK_SIZE
            )
            zeros = torch.zeros_like(positions)
            step = ForwardStep(zeros, positions, (plan,), (self._slots(positions),), zeros[:1])
            self.cache.begin(step.on_device(self._device.to_device))
            try:
                yield part
            finally:
                self.cache.end()

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        blocks = self._blocks[positions // _BLOCK_SIZE].to(torch.int64)
        return blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE


def record(
    prepared: ModelToProve, modules: Iterable[nn.Module], layers: dict[nn.Module, int]
) -> tuple[Calls, Calls]:
    """Each module's call, near and far; without modules that the forward skips or calls in another form.

    layers: layer number of each module that stores K and V.
    """
    wanted = list(modules)
    if not wanted or model_cache_class(prepared.loaded.model) is not DynamicCache:
        return {}, {}  # a model's own cache class cannot be filled with random values: nothing is fused then
    longest, spec = prepared.loaded.max_model_len, prepared.spec.layers
    tokens = text_tokens(prepared, min(NUM_TOKENS, longest))
    before = max(0, tokens.numel() - NUM_ROWS)
    rows = tokens[before:]
    cache = empty_model_cache(prepared.loaded.model)
    if before:
        _forward(prepared, tokens[:before], 0, cache, _CallRecorder(wanted, layers, spec, None))
    near = _CallRecorder(wanted, layers, spec, before)
    _forward(prepared, rows, before, cache, near)
    beyond = max([NUM_TOKENS, *(layer.span.size + _AROUND for layer in spec)])
    start = max(0, min(beyond, longest - rows.numel()))
    far = _CallRecorder(wanted, layers, spec, start)
    _forward(prepared, rows, start, _RandomCache(prepared, start), far)
    return near.calls, far.calls


def text_tokens(prepared: ModelToProve, count: int) -> torch.Tensor:
    """int64 [count]: the text of the package, or random ids."""
    ids: list[int] = []
    if (tokenizer := prepared.loaded.tokenizer) is not None:
        try:
            ids = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
        except Exception:  # an unusual tokenizer: any ids will do
            ids = []
    kept_ids = torch.tensor(ids, dtype=torch.int64)
    kept_ids = kept_ids[(kept_ids >= 0) & (kept_ids < prepared.vocab_size)]
    if kept_ids.numel() < 64:
        return torch.randint(prepared.vocab_size, (count,), generator=torch.Generator().manual_seed(count))
    return kept_ids.repeat(-(-count // kept_ids.numel()))[:count]


class _StopForward(Exception):  # noqa: N818 - no error: every call has been recorded
    pass


class _CallRecorder:
    """Records the call of each of `modules`, at position `start`, and ends the forward after the last one.

    start: None records nothing.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        layers: dict[nn.Module, int],
        spec: Sequence[LayerSpec],
        start: int | None,
    ) -> None:
        self.calls: Calls = {}
        self._modules, self._layers, self._spec, self._start = modules, layers, spec, start
        self._left = set(modules)
        self._hooks: list[Any] = []

    def __enter__(self) -> _CallRecorder:
        for module in self._modules:
            if self._start is not None:
                self._hooks.append(module.register_forward_pre_hook(self._record_call, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._end_forward, always_call=False))
        return self

    def __exit__(self, kind: Any, *rest: Any) -> bool:
        while self._hooks:
            self._hooks.pop().remove()
        return kind is _StopForward

    def _record_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keywords = dict(kwargs)
        hidden = args[0] if args else keywords.pop("hidden_states", None)
        if not isinstance(hidden, torch.Tensor) or len(args) > 1 or not hidden.is_floating_point():
            return
        name = next((name for name in CACHE_KEYWORDS if keywords.get(name) is not None), None)
        cache = None if name is None else keywords.pop(name)
        layer = self._layers.get(module)
        past = None
        if cache is not None and layer is not None:
            past = cache.past_of(layer) if isinstance(cache, _RandomCache) else _cached_kv(cache, layer)
            if past is None:
                past = _empty_past(self._spec[layer], hidden)
        start = self._start or 0
        self.calls[module] = Call(hidden.detach().clone(), keywords, name, past, start, layer)

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        self._left.discard(module)
        if not self._left:
            raise _StopForward


def _forward(
    prepared: ModelToProve, ids: torch.Tensor, start: int, cache: Cache, recorder: _CallRecorder
) -> None:
    positions = torch.arange(start, start + ids.numel())
    with recorder:
        prepared.model_logits(ids, positions, cache, eager=True)


def _cached_kv(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    stored = cache.layers[layer]
    if not getattr(stored, "is_initialized", False):
        return None
    return stored.keys.detach(), stored.values.detach()


def _empty_past(layer: LayerSpec, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k_width, v_width = layer.input_dims
    return (
        hidden.new_empty(1, layer.num_kv_heads, 0, k_width),
        hidden.new_empty(1, layer.num_kv_heads, 0, v_width),
    )


def _append_tokens(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, width]: past, followed by `new`. A patched module (`quire.model.attention_patch`) may itself
    store each head once for every query head that reads it."""
    return torch.cat([past.repeat_interleave(new.shape[1] // past.shape[1], dim=1), new], dim=2)


class _ReplayCache(DynamicCache):
    """The cache of one call: `past` before it, no storage. updated: the layers that the module named."""

    def __init__(self, past: tuple[torch.Tensor, torch.Tensor], start: int) -> None:
        super().__init__()
        self._past, self._start = past, start
        self.updated: list[int] = []

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated.append(layer_idx)
        k, v = self._past
        return _append_tokens(k, key_states), _append_tokens(v, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start


class _RandomCache(DynamicCache):
    """A cache that reports `start` tokens in every layer; their K and V are random, generated when a layer reads."""

    def __init__(self, prepared: ModelToProve, start: int) -> None:
        super().__init__(config=prepared.loaded.model.config)
        self._spec, self._start, self._dtype = prepared.spec.layers, start, prepared.loaded.dtype
        self._place = prepared.device.torch_device

    def past_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self._spec[layer]
        count = self._visible(layer)
        generator = torch.Generator().manual_seed(layer)
        k, v = (
            torch.randn(1, stored.num_kv_heads, count, width, generator=generator)
            for width in stored.input_dims
        )
        return k.to(self._place, self._dtype), v.to(self._place, self._dtype)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        k, v = self.past_of(layer_idx)
        return _append_tokens(k, key_states), _append_tokens(v, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        count = self._visible(layer_idx)
        return count + query_length, self._start - count

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._start

    def _visible(self, layer: int) -> int:
        """Tokens before the first row that a transformers cache still has in this layer."""
        size = self._spec[layer].span.size
        return min(self._start, size - 1) if size else self._start


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(inner, dtype) for inner in value)
    return value
