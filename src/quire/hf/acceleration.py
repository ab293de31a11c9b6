"""`accelerate(model)`: the model's own `generate`, with Quire's kernels under it, and `restore(model)`.

A forward with a QuireCache is computed as one of Quire's steps: the batch as one flattened row without its padding,
the packed linear layers, fused layers where the model has them, and attention that reads the cache's rows. The answer
has the form the model's own forward gives. Every other forward (another cache or none, labels, attentions or hidden
states asked for, a gradient, a mask that is more than left padding) is the model's own, on packed linear layers.
Models whose forward Quire does not run exactly (states, latents, rotary embeddings that switch with the length) get
the packed linear layers alone, and keep their own attention.
Between the forwards of a `generate` on a QuireCache torch has one thread: what transformers computes there is small,
and torch's other threads would spin on into the next step, where the kernels' want to run.

Not a copy: the model is changed in place, and given back by `restore` as it was.

Cost: packing, and the probe's small forwards, once; each weight exists once.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.backends import native_module
from quire.errors import ArgumentError, ConfigError, UnsupportedModelError
from quire.hf.cache import QuireCache
from quire.hf.layers import RowLayer
from quire.hf.row_storage import RowStorage
from quire.model import rope
from quire.model.holding import hold, let_go, require_free
from quire.model.linear import pack_linears
from quire.model.load import load
from quire.model.prepare import PreparedModel
from quire.torch_threads import one_torch_thread, torch_threads

__all__ = ["Acceleration", "accelerate", "restore"]

# Keywords that say nothing, whatever they hold, and those that say nothing when they are None or False.
_UNHEEDED = frozenset({"use_cache", "return_dict"})
# What `generate` may be given, behind its first two arguments, that computes by itself: torch keeps its threads then.
_OTHERS_WORK = ("assistant_model", "logits_processor", "stopping_criteria", "custom_generate")
_GIVEN = ("input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep")


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` has done.

    level: "whole", forwards with a QuireCache are Quire's steps; "linears", only linear layers are packed, for
    `reason`.
    """

    level: Literal["whole", "linears"]
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class _Accelerated:
    done: Acceleration
    undo: Callable[[], None]


_accelerated: weakref.WeakKeyDictionary[PreTrainedModel, _Accelerated] = weakref.WeakKeyDictionary()


def accelerate(model: PreTrainedModel) -> Acceleration:
    """Have `model.generate(..., past_key_values=QuireCache(model.config))` run on Quire's kernels, until `restore`.

    Done twice, nothing happens the second time.

    Raises:
        ArgumentError: not a transformers model, one that is not on the CPU, or one that an open LLM runs.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(f"expected a transformers model to accelerate, got {type(model).__name__}")
    known = _accelerated.get(model)
    if known is not None:
        return known.done
    elsewhere = {str(parameter.device) for parameter in model.parameters()} - {"cpu"}
    if elsewhere:
        raise ArgumentError(
            f"expected a model on the CPU to accelerate, got weights on {', '.join(sorted(elsewhere))}; move it with "
            "model.to('cpu')"
        )
    require_free(model)
    training = model.training
    prepared: PreparedModel | None = None
    reason: str | None = None
    try:
        if native_module() is None:
            reason = "the native extension is not built here"
        elif rope.original_length(model) is not None:
            reason = "its rotary embeddings switch with the length of the input"
        else:
            prepared = PreparedModel(load((model, None)), backend="native")
    except (UnsupportedModelError, ConfigError) as error:
        reason = str(error)
    if prepared is None:
        accelerated = _Accelerated(Acceleration("linears", reason), pack_linears(model))
        hold(model, accelerated, [accelerated.undo])
    else:
        accelerated = _Accelerated(Acceleration("whole"), _install(model, prepared))
    model.train(training)
    _accelerated[model] = accelerated
    return accelerated.done


def restore(model: PreTrainedModel) -> None:
    """Make the model what it was before `accelerate`. For a model that was not accelerated, nothing happens."""
    accelerated = _accelerated.pop(model, None)
    if accelerated is not None:
        training = model.training
        accelerated.undo()
        let_go(model, accelerated)
        model.train(training)


def _install(model: PreTrainedModel, prepared: PreparedModel) -> Callable[[], None]:
    """Put Quire's forward before the model's, and `generate` on one torch thread; returns what undoes all of it."""
    own_forward: Callable[..., Any] = model.forward
    own_generate: Callable[..., Any] = cast(Any, model).generate
    before = {name: model.__dict__[name] for name in ("forward", "generate") if name in model.__dict__}
    steps = _Steps(weakref.ref(model), prepared)
    signature = inspect.signature(own_forward)
    threads: list[int] = []  # of torch outside of each `generate` under way

    @functools.wraps(own_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            bound = signature.bind(*args, **kwargs).arguments
            kwargs = {
                **{name: value for name, value in bound.items() if name != "kwargs"},
                **bound.get("kwargs", {}),
            }
        with torch_threads(threads[-1]) if threads else nullcontext():
            answer = steps.answer(kwargs)
            return own_forward(**kwargs) if answer is None else answer

    @functools.wraps(own_generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        others = len(args) > 2 or any(kwargs.get(name) is not None for name in _OTHERS_WORK)
        if others or not isinstance(kwargs.get("past_key_values"), QuireCache):
            return own_generate(*args, **kwargs)
        threads.append(threads[-1] if threads else torch.get_num_threads())
        try:
            with one_torch_thread():
                return own_generate(*args, **kwargs)
        finally:
            threads.pop()

    model.__dict__.update(forward=forward, generate=generate)

    def undo() -> None:
        for name in ("forward", "generate"):
            del model.__dict__[name]
        model.__dict__.update(before)
        prepared.restore()

    return undo


class _Steps:
    """Forwards of one prepared model that are Quire's."""

    def __init__(self, model: weakref.ref[PreTrainedModel], prepared: PreparedModel) -> None:
        self._model = model
        self._prepared = prepared
        self._storages: weakref.WeakKeyDictionary[QuireCache, RowStorage] = weakref.WeakKeyDictionary()
        self._attached: RowStorage | None = None
        from quire.model.fused.structure import forward_names  # needs the extension, as this class does

        # Attention that takes its positions from the cache's length (Llama 4's temperature) counts padding with them.
        self._counts_padding = any(
            "get_seq_length" in forward_names(module)
            for module in prepared.loaded.model.modules()
            if hasattr(module, "layer_idx")
        )

    def answer(self, given: dict[str, Any]) -> CausalLMOutputWithPast | None:
        """The forward's answer to these keywords; None where it is the model's own to give."""
        cache = given.get("past_key_values")
        if not isinstance(cache, QuireCache) or torch.is_grad_enabled():
            return None
        if given.get("return_dict") is False or given.get("use_cache") is False:
            return None
        ids, kept = given.get("input_ids"), given.get("logits_to_keep", 0)
        if (
            ids is None
            or ids.dim() != 2
            or ids.dtype is not torch.int64
            or ids.numel() == 0
            or ids.device.type != "cpu"
            or type(kept) is not int
            or not self._serves(cache, ids.shape[0])
            or any(
                value is not None and value is not False
                for name, value in given.items()
                if name not in _GIVEN and name not in _UNHEEDED
            )
            or self._asks_for_more()
        ):
            return None
        length = cache.get_seq_length()
        pads = _pads(given.get("attention_mask"), ids.shape[0], length + ids.shape[1])
        positions = _positions(given.get("position_ids"), ids.shape, length)
        if pads is None or positions is None or (self._counts_padding and pads.any()):
            return None
        return self._run(cache, ids, positions, pads, min(kept, ids.shape[1]) or ids.shape[1])

    def _run(
        self, cache: QuireCache, ids: torch.Tensor, positions: torch.Tensor, pads: np.ndarray, kept: int
    ) -> CausalLMOutputWithPast | None:
        storage = self._storage_of(cache)
        cache.check_whole()
        storage.open(ids.shape[0])
        step = storage.step(ids, positions, pads, kept)
        if step is None:
            return None
        if self._attached is not storage:
            self._prepared.attach(cast(Any, storage))  # the part of a Storage that a forward uses
            self._attached = storage
        logits = self._prepared.forward(step.forward)
        storage.stored(ids.shape[1])
        if cache.filled_by is None:
            cache.filled_by = self._model
        return CausalLMOutputWithPast(
            logits=_in_form(logits, step.logits_at, ids.shape[0] * kept).view(ids.shape[0], kept, -1),  # type: ignore[arg-type]
            past_key_values=cache,
        )

    def _serves(self, cache: QuireCache, num_rows: int) -> bool:
        """Whether the cache is one of this model's shape, or empty."""
        layers, prepared = self._prepared.spec.layers, self._prepared
        storage = self._storages.get(cache)
        if storage is not None and storage.is_open(num_rows):
            return True  # it was, and has the same rows
        if len(cache.layers) != len(layers):
            return False
        for layer, stored in zip(cache.layers, layers, strict=True):
            if isinstance(layer, RowLayer) != (stored.shares_kv_with is None):
                return False
            if isinstance(layer, RowLayer) and layer.is_initialized:
                shape = layer.shape
                if (
                    shape.num_rows != num_rows
                    or shape.dtype is not prepared.loaded.dtype
                    or shape.num_heads != (stored.num_kv_heads, stored.num_kv_heads)
                    or shape.widths != (stored.k_head_dim, stored.v_head_dim)
                ):
                    return False
        return True

    def _asks_for_more(self) -> bool:
        """Whether the model's config asks for what a step does not give."""
        config = self._prepared.loaded.model.config
        return any(
            getattr(config, name, False)
            for name in ("output_attentions", "output_hidden_states", "output_router_logits")
        )

    def _storage_of(self, cache: QuireCache) -> RowStorage:
        storage = self._storages.get(cache)
        if storage is None:
            storage = RowStorage(cache, self._prepared.spec, self._prepared.loaded.dtype)
            self._storages[cache] = storage
            detach = functools.partial(_detach, weakref.ref(self), weakref.ref(storage))
            cache.detachers.append(detach)
            weakref.finalize(cache, detach).atexit = False
        return storage


def _in_form(logits: torch.Tensor, at: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, vocab_size], nobody else's, usable outside of inference mode: rows `at`, which rise, are `logits`.

    The others, which are padding's, are zeros.
    """
    whole = len(at) == num_rows
    if whole and not logits.is_inference():
        return logits
    # One thread: torch's second one would go on spinning where the next step's kernels want to run.
    with torch.inference_mode(False), one_torch_thread():
        if whole:
            return logits.clone()
        out = logits.new_zeros((num_rows, logits.shape[1]))
        out[at] = logits
        return out


def _detach(steps: weakref.ref[_Steps], storage: weakref.ref[RowStorage]) -> None:
    """The cache has gone, or gives its memory back: nothing here holds it any more."""
    owner, held = steps(), storage()
    if held is not None:
        held.drop()
        if owner is not None and owner._attached is held:
            owner._attached = None
            owner._prepared.attach(None)


def _pads(mask: Any, num_rows: int, length: int) -> np.ndarray | None:
    """Leading padding of each row, int64 [num_rows]; None for a mask that is something else."""
    if mask is None:
        return np.zeros(num_rows, np.int64)
    if not isinstance(mask, torch.Tensor) or mask.shape != (num_rows, length) or mask.is_floating_point():
        return None
    seen = mask.numpy() != 0
    pads = np.argmax(seen, axis=1)
    if not all(row[pad:].all() for row, pad in zip(seen, pads, strict=True)):
        return None
    return pads


def _positions(given: Any, shape: torch.Size, length: int) -> torch.Tensor | None:
    """int64 [B, T]; None for positions of another form."""
    if given is None:
        return torch.arange(length, length + shape[1]).expand(shape)
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.shape[1] != shape[1]:
        return None
    return given.expand(shape) if given.dtype is torch.int64 else None
