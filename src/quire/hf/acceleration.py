"""`accelerate(model)` runs the model's own `generate` on Quire's kernels; `restore(model)` undoes it.

Quire computes a forward with a QuireCache as one of its steps: the batch as one flattened row without its padding, the
packed linear layers, fused layers where the model has them, and attention that reads the cache's rows. The output has
the form of the model's own forward. The model's own forward, on packed linear layers, computes every other call
(another cache or none, labels, requested attentions or hidden states, a gradient, a mask beyond left padding). Models
whose forward Quire does not run exactly (states, latents, rotary embeddings that switch with the length) get only the
packed linear layers and keep their own attention. Between the forwards of a `generate` on a QuireCache torch has one
thread: transformers computes little there, and torch's other threads would spin on into the next step and compete with
the kernels' threads. A back end by name computes, on any device. The model, its ids and its logits lie in host memory;
if the back end has memory of its own, the cache refuses a forward on a QuireCache that is not a step.

Forwards of one model are serialised (`_Accelerated.lock`): a step switches the model's attention and needs all kernel
threads anyway. The rest of `generate` runs concurrently in several threads.

A QuireCache whose keys are codes gets its key offsets at its first such forward, measured as an engine does, once for a
model and format. A cache that holds keys already keeps its offsets.

Not a copy: `accelerate` changes the model in place, and `restore` returns it as it would be without.

Changes of the model are noticed (`prove.model_record`): each `generate`, and each forward outside of one, first
compares the model with its record. After a change of weights, adapters, attributes or dtype the preparation is undone
and made and proved again, which may end at packed linear layers only (`accelerate(model)` tells). A step cannot run
hooks or training mode as the model's own forward does: that forward computes while they are on, and under
`torch.autocast`.

Cost: packing, and the probe's small forwards, once, and after a change; each weight exists once. A comparison takes
some 0.2 ms.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.backends import extension
from quire.devices import Device, device_of
from quire.errors import ArgumentError, ConfigError, UnsupportedModelError
from quire.hf.layers import RowLayer
from quire.hf.quire_cache import QuireCache
from quire.hf.row_storage import RowStorage
from quire.model import rope
from quire.model.cache_keyword import CACHE_KEYWORDS, cache_keyword, given_cache
from quire.model.key_offsets import KeyOffsets, measure_key_offsets, sees_offsets
from quire.model.model_lock import lock_model, require_unlocked, unlock_model
from quire.model.prepare import PreparedModel
from quire.model.prove.model_record import ModelRecord
from quire.model.unsupported import counts_padding
from quire.modules.hooks import first_hook, without_hooks
from quire.modules.module_patch import current_method, patch_methods
from quire.process import ForkSafeLock
from quire.torch_threads import one_torch_thread, torch_threads
from quire.weights.linear import pack_linears, packing_on
from quire.weights.load import base_model, load, why_not_dense

__all__ = ["Acceleration", "accelerate", "restore"]

_log = logging.getLogger("quire")

# Keywords of a forward without effect, whatever their value. All others have no effect when None or False.
_NO_EFFECT = frozenset({"use_cache", "return_dict"})
# Arguments of `generate`, behind its first two, that compute by themselves: torch keeps its threads then.
_COMPUTING_OPTIONS = ("assistant_model", "logits_processor", "stopping_criteria", "custom_generate")
_STEP_KEYWORDS = ("input_ids", "attention_mask", "position_ids", "logits_to_keep", *CACHE_KEYWORDS)
_OUTPUT_KEYWORD = cast(str, cache_keyword(CausalLMOutputWithPast))


@dataclass(frozen=True)
class Acceleration:
    """The result of `accelerate`.

    level: "whole": forwards with a QuireCache are Quire's steps; "linears": only linear layers are packed, for
    `reason`.
    """

    level: Literal["whole", "linears"]
    reason: str | None = None


class _Accelerated:
    """An accelerated model and the present state of its acceleration."""

    def __init__(self, model: PreTrainedModel, backend: Device | None) -> None:
        self._model = weakref.ref(model)
        self.backend = backend  # None: no steps, and linear layers packed as this machine can
        self._undo: list[Callable[[], None]] = []
        self._record: ModelRecord | None = None
        self._steps: _Steps | None = None
        self._acceleration = Acceleration("whole")
        self._own_forward_reason: str | None = None  # reason, while the model's own forward computes
        self._local = threading.local()
        self.lock = ForkSafeLock()  # guards a forward, and the comparison with the record
        self._prepare(model)

    @property
    def acceleration(self) -> Acceleration:
        self.compare()
        return (
            self._acceleration
            if self._own_forward_reason is None
            else Acceleration("linears", self._own_forward_reason)
        )

    def answer(self, given: dict[str, Any]) -> CausalLMOutputWithPast | None:
        """The output of a forward with these keywords; None if the model's own forward must compute it."""
        if self._steps is None or not isinstance(self._steps.cache_of(given), QuireCache):
            return None
        if _is_compiled():
            raise ArgumentError(
                "expected a model that is not compiled with a QuireCache, got one that torch.compile runs: Quire's "
                "kernels need no compilation; call the model itself"
            )
        if not self.generating:
            self.compare()
        if self._own_forward_reason is not None or self._steps is None or torch.is_autocast_enabled("cpu"):
            return None
        return self._steps.answer(given)

    @property
    def generating(self) -> bool:
        """Whether this thread is in a `generate`, which has compared the model already."""
        return getattr(self._local, "depth", 0) > 0

    @contextmanager
    def generate(self) -> Iterator[None]:
        """Context of a `generate` call of this thread."""
        if not self.generating:
            self.compare()
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def compare(self) -> None:
        """Compare the model with its record, and prepare it again after a change."""
        with self.lock:
            self._compare()

    def _compare(self) -> None:
        model = self._model()
        if self._record is None or model is None or torch.compiler.is_compiling():
            return
        comparison = self._record.compare()
        if comparison.changed is not None:
            self._undo_all()
            self._prepare(model)
            assert self._record is not None
            comparison = self._record.compare()
        self._own_forward_reason = None
        if comparison.hooks:
            self._own_forward_reason = (
                f"{first_hook(model)} expects the model's own forward; remove it to have Quire's"
            )
        elif comparison.training:
            self._own_forward_reason = "the model is in training mode; call model.eval()"

    def undo(self) -> None:
        self._undo_all()
        self._record = None

    def _undo_all(self) -> None:
        self._steps = None
        while self._undo:
            self._undo.pop()()

    def _prepare(self, model: PreTrainedModel) -> None:
        prepared: PreparedModel | None = None
        reason = why_not_dense(model)
        try:
            with without_hooks(model):  # hooks must not see the probe's forwards
                if reason is not None:
                    pass
                elif self.backend is None:
                    reason = "the native extension is not built here"
                elif rope.original_length(model) is not None:
                    reason = "its rotary embeddings switch with the length of the input"
                else:
                    loaded = load((model, None))
                    if any(layer.latent for layer in loaded.spec.layers):
                        reason = (
                            f"model type {loaded.model_type}: its layers keep latents (MLA), whose two parts lie apart "
                            "in a QuireCache; LLM runs it whole"
                        )
                    elif loaded.spec.states:
                        reason = (
                            f"model type {loaded.model_type}: its layers keep states, which in a QuireCache are "
                            "transformers' own; LLM runs it whole"
                        )
                    elif not all(layer.attends for layer in loaded.spec.layers):
                        reason = (
                            f"model type {loaded.model_type}: it has layers that attend to an image alone; LLM runs it "
                            "whole, for text"
                        )
                    else:
                        prepared = PreparedModel(loaded, backend=self.backend.name)
        except (UnsupportedModelError, ConfigError) as error:
            reason = str(error)
        except ArgumentError as error:
            if self._record is None:
                raise
            reason = str(error)  # moved to a device where Quire does not run it
        if prepared is None:
            self._acceleration = Acceleration("linears", reason)
            packing, pack = None, None
            if self.backend is not None:
                packing, pack = packing_on(self.backend), self.backend.pack
            undo = pack_linears(model, packing, pack=pack)
            self._undo.append(undo)
            lock_model(model, self, self._undo)
            self._undo.append(lambda: unlock_model(model, self))
            if self._record is not None:
                self._record = ModelRecord(model)
            return
        prepared.give_back_training()
        self._acceleration = Acceleration("whole")
        self._undo.append(prepared.restore)
        self._steps = _Steps(self._model, prepared, cache_keyword(current_method(model, "forward")))
        self._record = prepared.model_record


_NAME = "_quire_accelerated"  # in the model's __dict__, so that it lives as long as the model


def accelerate(model: PreTrainedModel, *, backend: str | None = None) -> Acceleration:
    """Have `model.generate(..., cache=QuireCache(model.config))` run on Quire's kernels, until `restore`.

    A second call only returns the present state. A PeftModel is accelerated through its base model, with the adapters
    in it.

    Args:
        backend: name of the back end that computes, see `quire.devices.device_of`; by default the extension, if
            built; for a model on a card the kernels for it. On another device than this machine caches are
            `QuireCache(model.config, storage="growing", backend=...)`.

    Raises:
        ArgumentError: not a transformers model, a model on several devices, that an open LLM runs or that is
            accelerated on another back end, or an unknown back end.
        BackendError: the extension was requested but is not built.
    """
    model = base_model(model, "accelerate")
    known = model.__dict__.get(_NAME)
    if known is not None:
        device: Device | None = known[0].backend
        if backend is not None and (device is None or device.name != backend):
            raise ArgumentError(
                f"expected backend {'None' if device is None else repr(device.name)}, which accelerates the model, got "
                f"{backend!r}; restore(model) first"
            )
        return known[0].acceleration
    places = {str(parameter.device) for parameter in model.parameters()}
    if len(places) > 1:
        raise ArgumentError(
            f"expected a model on one device to accelerate, got weights on {', '.join(sorted(places))}; move it with "
            "model.to(...)"
        )
    require_unlocked(model)
    place = places.pop()
    if backend is None and place != "cpu":
        backend = f"@{place}"
    elif backend is None and extension() is not None:
        backend = "native"
    accelerated = _Accelerated(model, None if backend is None else device_of(backend))
    model.__dict__[_NAME] = accelerated, _install(model, accelerated)
    return accelerated.acceleration


def restore(model: PreTrainedModel) -> None:
    """Make the model what it would be without `accelerate`, changes made meanwhile included.

    Does nothing for a model that is not accelerated.
    """
    known = base_model(model, "restore").__dict__.pop(_NAME, None)
    if known is not None:
        accelerated, uninstall = known
        uninstall()
        accelerated.undo()


def _install(model: PreTrainedModel, accelerated: _Accelerated) -> Callable[[], None]:
    """Put Quire's forward before the model's, and `generate` on one torch thread; returns a call that undoes it."""
    model_forward, model_generate = current_method(model, "forward"), current_method(model, "generate")
    names = list(inspect.signature(model_forward).parameters)
    keyword = cache_keyword(model_forward)
    here = _ThreadState()
    spins = (
        accelerated.backend is None or accelerated.backend.is_native
    )  # in addition to the kernels' threads

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        outside = here.torch_threads
        with accelerated.lock, torch_threads(outside[-1]) if outside else nullcontext():
            answer = (
                accelerated.answer(given) if len(given) == len(args) + len(kwargs) else None
            )  # None: the model's own forward raises the TypeError
            return model_forward(*args, **kwargs) if answer is None else answer

    def generate(*args: Any, **kwargs: Any) -> Any:
        with accelerated.generate():
            others = len(args) > 2 or any(kwargs.get(name) is not None for name in _COMPUTING_OPTIONS)
            if others or not spins or not isinstance(given_cache(keyword, kwargs), QuireCache):
                return model_generate(*args, **kwargs)
            outside = here.torch_threads
            outside.append(outside[-1] if outside else torch.get_num_threads())
            try:
                with one_torch_thread():
                    return model_generate(*args, **kwargs)
            finally:
                outside.pop()

    return patch_methods(model, forward=forward, generate=generate)


def _is_compiled() -> bool:
    """Whether this thread runs under torch.compile: traced, or called by traced code."""
    if "torch._dynamo" not in sys.modules:
        return False
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() or callable(frames.get_eval_frame_callback())


class _ThreadState(threading.local):
    """torch_threads: torch's thread count outside of each running `generate` of this thread."""

    def __init__(self) -> None:
        self.torch_threads: list[int] = []


class _Steps:
    """Computes forwards of one prepared model as steps. Called with the model's lock held."""

    def __init__(
        self, model: weakref.ref[PreTrainedModel], prepared: PreparedModel, keyword: str | None
    ) -> None:
        self._model = model
        self._cache_keyword = keyword  # of the model's forward
        self._prepared = prepared
        self._storages: weakref.WeakKeyDictionary[QuireCache, RowStorage] = weakref.WeakKeyDictionary()
        self._offsets: dict[tuple[tuple[str, str], ...], KeyOffsets] = {}  # by formats of the layers
        self._counts_padding = any(
            counts_padding(type(module))
            for module in prepared.loaded.model.modules()
            if hasattr(module, "layer_idx")
        )

    def cache_of(self, given: dict[str, Any]) -> Any:
        """The cache among a forward's arguments."""
        return given_cache(self._cache_keyword, given)

    def answer(self, given: dict[str, Any]) -> CausalLMOutputWithPast | None:
        """The output of a forward with these keywords; None if the model's own forward must compute it."""
        cache = self.cache_of(given)
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
            or type(kept) is not int
            or not self._fits_model(cache, ids.shape[0])
            or any(
                value is not None and value is not False
                for name, value in given.items()
                if name not in _STEP_KEYWORDS and name not in _NO_EFFECT
            )
            or self._requests_more_outputs()
        ):
            return None
        length, place, ids = cache.get_seq_length(), ids.device, ids.cpu()
        pads = _pads(given.get("attention_mask"), ids.shape[0], length + ids.shape[1], self._prepared.device)
        positions = _positions(given.get("position_ids"), ids.shape, length)
        if pads is None or positions is None or (self._counts_padding and pads.any()):
            return None
        return self._run(cache, ids, positions, pads, min(kept, ids.shape[1]) or ids.shape[1], place)

    def _run(
        self,
        cache: QuireCache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pads: np.ndarray,
        kept: int,
        place: torch.device,
    ) -> CausalLMOutputWithPast | None:
        """The output of a step in host memory; its logits are on `place`."""
        storage = self._storage_of(cache)
        cache.check_whole()
        self._measure_offsets(cache)
        storage.open(ids.shape[0])
        step = storage.step(ids, positions, pads, kept)
        if step is None:
            return None
        if storage.paged is None:
            storage.paged = self._prepared.cache_over(
                cast(Any, storage)
            )  # a RowStorage has the part of a Storage that a forward uses
            storage.paged.key_offsets = cache.key_offsets
        logits = self._prepared.forward(step.forward, storage.paged)
        if place.type == "cpu":
            logits = self._prepared.device.to_host(logits)
        storage.advance(ids.shape[1])
        if cache.filled_by is None:
            cache.filled_by = self._model
        answer: dict[str, Any] = {
            "logits": _in_batch_form(logits, step.logits_at, ids.shape[0] * kept).view(
                ids.shape[0], kept, -1
            ),
            _OUTPUT_KEYWORD: cache,
        }
        return CausalLMOutputWithPast(**answer)

    def _measure_offsets(self, cache: QuireCache) -> None:
        """Measure the key offsets of an empty cache, unless they are known."""
        formats = cache.formats
        if formats.is_known:
            return
        spec = formats.with_formats(self._prepared.spec)
        kinds = tuple((layer.k_format, layer.v_format) for layer in spec.layers)
        found = self._offsets.get(kinds)
        if found is None:
            found = self._offsets[kinds] = measure_key_offsets(self._prepared, spec)
            if found.left_out:
                _log.warning(
                    "%s: layers %s of a QuireCache keep K and V in %s: their keys have channels far from zero, and "
                    "sinks or a soft cap forbid subtracting an offset",
                    *(spec.name, ", ".join(map(str, sorted(found.left_out))), spec.dtype),
                )
        is_open = any(
            layer.is_initialized for layer in cache.row_layers
        )  # True: a first step was interrupted
        formats.settle(found.by_layer, frozenset() if is_open else found.left_out)

    def _fits_model(self, cache: QuireCache, num_rows: int) -> bool:
        """Whether the cache is empty or has this model's shape."""
        layers, prepared = self._prepared.spec.layers, self._prepared
        storage = self._storages.get(cache)
        if storage is not None and storage.is_open(num_rows):
            return True  # checked before, and with the same rows
        if len(cache.layers) != len(layers):
            return False
        theirs, ours = cache.backend, prepared.device
        if theirs.name != ours.name and not (theirs.is_host and ours.is_host):
            how = "without backend=" if ours.is_host else f'with storage="growing", backend={ours.name!r}'
            raise ArgumentError(
                f"expected a QuireCache in memory that backend {ours.name!r}, which runs the model, reads, got one of "
                f"backend {theirs.name!r}; make it {how}, or restore(model)"
            )
        if cache.key_offsets and sees_offsets(prepared.loaded.model):
            return False  # offsets from the model's own forward or the caller: kernels cannot add them back
        if not cache.formats.names <= set(ours.kv_formats):
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

    def _requests_more_outputs(self) -> bool:
        """Whether the model's config requests outputs that a step does not have."""
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
            detach = functools.partial(_drop, weakref.ref(storage))
            cache.detachers.append(detach)
            weakref.finalize(cache, detach).atexit = False
        return storage


def _in_batch_form(logits: torch.Tensor, at: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A new tensor [num_rows, vocab_size], usable outside of inference mode, with `logits` in the ascending rows `at`.

    The other rows belong to padding and are zeros.
    """
    whole = len(at) == num_rows
    if whole and not logits.is_inference():
        return logits
    # One thread: torch's second thread would go on spinning and slow down the next step's kernels.
    with torch.inference_mode(False), one_torch_thread():
        if whole:
            return logits.clone()
        out = logits.new_zeros((num_rows, logits.shape[1]))
        out[at.to(logits.device)] = logits
        return out


def _drop(storage: weakref.ref[RowStorage]) -> None:
    """Release the views of a cache that was collected or gives its memory back. Also a finalizer, in any thread."""
    held = storage()
    if held is not None:
        held.drop()


def _pads(mask: Any, num_rows: int, length: int, backend: Device) -> np.ndarray | None:
    """Leading padding of each row, int64 [num_rows]; None for any other mask.

    A row of padding only is left to the model's own forward, which has some output for it, if the back end is the host.
    """
    if mask is None:
        return np.zeros(num_rows, np.int64)
    if not isinstance(mask, torch.Tensor) or mask.shape != (num_rows, length) or mask.is_floating_point():
        return None
    seen = mask.cpu().numpy() != 0
    pads = np.argmax(seen, axis=1)
    if not backend.is_host:
        pads[~seen.any(axis=1)] = length
    if not all(row[pad:].all() for row, pad in zip(seen, pads, strict=True)):
        return None
    return pads


def _positions(given: Any, shape: torch.Size, length: int) -> torch.Tensor | None:
    """Positions, int64 [B, T]; None if `given` has another form."""
    if given is None:
        return torch.arange(length, length + shape[1]).expand(shape)
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.shape[1] != shape[1]:
        return None
    return given.cpu().expand(shape) if given.dtype is torch.int64 else None
