"""`accelerate(model)`: the model's own `generate`, with Quire's kernels under it, and `restore(model)`.

A forward with a QuireCache is computed as one of Quire's steps: the batch as one flattened row without its padding,
the packed linear layers, fused layers where the model has them, and attention that reads the cache's rows. The answer
has the form the model's own forward gives. Every other forward (another cache or none, labels, attentions or hidden
states asked for, a gradient, a mask that is more than left padding) is the model's own, on packed linear layers.
Models whose forward Quire does not run exactly (states, latents, rotary embeddings that switch with the length) get
the packed linear layers alone, and keep their own attention.
Between the forwards of a `generate` on a QuireCache torch has one thread: what transformers computes there is small,
and torch's other threads would spin on into the next step, where the kernels' want to run.
What computes is a back end by name, any device's. The model lies in host memory, and its ids and logits do; where the
back end's memory is its own, a forward on a QuireCache that is no step is refused, by the cache.

Forwards of one model take turns (`_Accelerated.lock`): a step switches the model's attention, and has the kernels'
threads for itself anyway. All else of `generate` runs beside those of other threads.

A QuireCache whose keys are codes gets from its first such forward what is taken off them: measured as an engine does,
once for a model and format. One that holds keys already keeps what it has.

Not a copy: the model is changed in place, and given back by `restore` as it would be without.

A model that somebody changes is followed (`prove.stamp`): each `generate`, and each forward outside of one, looks
first. Other weights, adapters, attributes, another dtype: everything is undone, prepared and proved again, which may
end at the packed linear layers alone (`accelerate(model)` tells). Hooks and training mode are nothing that a step could
show as the model's own forward does: that forward computes while they are there, and under `torch.autocast`.

Cost: packing, and the probe's small forwards, once, and after a change; each weight exists once. A look takes some
0.2 ms.
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

from quire.attention import Device
from quire.attention import backend as attention_backend
from quire.backends import extension
from quire.errors import ArgumentError, ConfigError, UnsupportedModelError
from quire.hf.layers import RowLayer
from quire.hf.quire_cache import QuireCache
from quire.hf.row_storage import RowStorage
from quire.model import rope
from quire.model.cache_keyword import CACHE_KEYWORDS, cache_keyword, given_cache
from quire.model.key_offsets import KeyOffsets, measure_key_offsets, sees_offsets
from quire.model.linear import pack_linears, packing_on
from quire.model.load import base_model, load, why_not_dense
from quire.model.model_lock import lock_model, require_unlocked, unlock_model
from quire.model.module_patch import current_method, patch_methods
from quire.model.prepare import PreparedModel
from quire.model.prove.hooks import hooked, without_hooks
from quire.model.prove.model_record import ModelRecord
from quire.model.unsupported import counts_padding
from quire.process import ForkSafeLock
from quire.torch_threads import one_torch_thread, torch_threads

__all__ = ["Acceleration", "accelerate", "restore"]

_log = logging.getLogger("quire")

# Keywords that say nothing, whatever they hold, and those that say nothing when they are None or False.
_UNHEEDED = frozenset({"use_cache", "return_dict"})
# What `generate` may be given, behind its first two arguments, that computes by itself: torch keeps its threads then.
_OTHERS_WORK = ("assistant_model", "logits_processor", "stopping_criteria", "custom_generate")
_GIVEN = ("input_ids", "attention_mask", "position_ids", "logits_to_keep", *CACHE_KEYWORDS)
_OUTPUT_KEYWORD = cast(str, cache_keyword(CausalLMOutputWithPast))


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` has done.

    level: "whole", forwards with a QuireCache are Quire's steps; "linears", only linear layers are packed, for
    `reason`.
    """

    level: Literal["whole", "linears"]
    reason: str | None = None


class _Accelerated:
    """One model that is accelerated: what is done about it now."""

    def __init__(self, model: PreTrainedModel, backend: Device | None) -> None:
        self._model = weakref.ref(model)
        self.backend = (
            backend  # None: nothing here computes steps, linear layers are packed as this machine can
        )
        self._undo: list[Callable[[], None]] = []
        self._stamp: ModelRecord | None = None
        self._steps: _Steps | None = None
        self._done = Acceleration("whole")
        self._own: str | None = None  # why the model's own forward computes for now
        self._local = threading.local()
        self.lock = ForkSafeLock()  # held by a forward, and by who looks whether the model has changed
        self._prepare(model)

    @property
    def done(self) -> Acceleration:
        self.look()
        return self._done if self._own is None else Acceleration("linears", self._own)

    def answer(self, given: dict[str, Any]) -> CausalLMOutputWithPast | None:
        """The answer to a forward with these keywords; None where it is the model's own to give."""
        if self._steps is None or not isinstance(self._steps.cache_of(given), QuireCache):
            return None
        if _is_compiled():
            raise ArgumentError(
                "expected a model that is not compiled with a QuireCache, got one that torch.compile runs: Quire's "
                "kernels need no compilation; call the model itself"
            )
        if not self.generating:
            self.look()
        if self._own is not None or self._steps is None or torch.is_autocast_enabled("cpu"):
            return None
        return self._steps.answer(given)

    @property
    def generating(self) -> bool:
        """Whether this thread is in a `generate`, which has looked."""
        return getattr(self._local, "depth", 0) > 0

    @contextmanager
    def generate(self) -> Iterator[None]:
        """A `generate` call of this thread."""
        if not self.generating:
            self.look()
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def look(self) -> None:
        """Follow what has been changed about the model."""
        with self.lock:
            self._look()

    def _look(self) -> None:
        model = self._model()
        if self._stamp is None or model is None or torch.compiler.is_compiling():
            return
        look = self._stamp.look()
        if look.changed is not None:
            self._undo_all()
            self._prepare(model)
            assert self._stamp is not None
            look = self._stamp.look()
        self._own = None
        if look.hooks:
            self._own = f"{hooked(model)} expects the model's own forward; remove it to have Quire's"
        elif look.training:
            self._own = "the model is in training mode; call model.eval()"

    def undo(self) -> None:
        self._undo_all()
        self._stamp = None

    def _undo_all(self) -> None:
        self._steps = None
        while self._undo:
            self._undo.pop()()

    def _prepare(self, model: PreTrainedModel) -> None:
        prepared: PreparedModel | None = None
        reason = why_not_dense(model)
        try:
            with without_hooks(model):  # the probe's forwards are nobody's business
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
            if self._stamp is None:
                raise
            reason = str(error)  # it has gone where Quire does not run it
        if prepared is None:
            self._done = Acceleration("linears", reason)
            packing, pack = None, None
            if self.backend is not None:
                packing, pack = packing_on(self.backend), self.backend.pack
            undo = pack_linears(model, packing, pack=pack)
            self._undo.append(undo)
            lock_model(model, self, self._undo)
            self._undo.append(lambda: unlock_model(model, self))
            if self._stamp is not None:
                self._stamp = ModelRecord(model)
            return
        prepared.give_back_training()
        self._done = Acceleration("whole")
        self._undo.append(prepared.restore)
        self._steps = _Steps(self._model, prepared, cache_keyword(current_method(model, "forward")))
        self._stamp = prepared.model_record


_NAME = "_quire_accelerated"  # in the model's __dict__, with which it goes


def accelerate(model: PreTrainedModel, *, backend: str | None = None) -> Acceleration:
    """Have `model.generate(..., past_key_values=QuireCache(model.config))` run on Quire's kernels, until `restore`.

    Done twice, nothing happens the second time but that it tells what holds by now. A PeftModel is accelerated through
    its base model, with the adapters in it.

    Args:
        backend: what computes, by a name of `quire.attention.backend`; not given, the extension where it is built. On
            another device than this machine caches are `QuireCache(model.config, storage="growing", backend=...)`.

    Raises:
        ArgumentError: not a transformers model, one that is not on the CPU, one that an open LLM runs, one that is
            accelerated on another back end, or a back end that does not exist.
        BackendError: the extension is asked for and was not built.
    """
    model = base_model(model, "accelerate")
    known = model.__dict__.get(_NAME)
    if known is not None:
        own: Device | None = known[0].backend
        if backend is not None and (own is None or own.name != backend):
            raise ArgumentError(
                f"expected backend {'None' if own is None else repr(own.name)}, on which the model is accelerated, "
                f"got {backend!r}; restore(model) first"
            )
        return known[0].done
    elsewhere = {str(parameter.device) for parameter in model.parameters()} - {"cpu"}
    if elsewhere:
        raise ArgumentError(
            f"expected a model on the CPU to accelerate, got weights on {', '.join(sorted(elsewhere))}; move it with "
            "model.to('cpu')"
        )
    require_unlocked(model)
    if backend is None and extension() is not None:
        backend = "native"
    accelerated = _Accelerated(model, None if backend is None else attention_backend(backend))
    model.__dict__[_NAME] = accelerated, _install(model, accelerated)
    return accelerated.done


def restore(model: PreTrainedModel) -> None:
    """Make the model what it would be without `accelerate`, changes made meanwhile included.

    For a model that was not accelerated, nothing happens.
    """
    known = base_model(model, "restore").__dict__.pop(_NAME, None)
    if known is not None:
        accelerated, uninstall = known
        uninstall()
        accelerated.undo()


def _install(model: PreTrainedModel, accelerated: _Accelerated) -> Callable[[], None]:
    """Put Quire's forward before the model's, and `generate` on one torch thread; returns what undoes that."""
    own_forward, own_generate = current_method(model, "forward"), current_method(model, "generate")
    names = list(inspect.signature(own_forward).parameters)
    keyword = cache_keyword(own_forward)
    here = _ThreadState()
    spins = accelerated.backend is None or accelerated.backend.is_native  # beside kernels' threads

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        outside = here.torch_threads
        with accelerated.lock, torch_threads(outside[-1]) if outside else nullcontext():
            answer = (
                accelerated.answer(given) if len(given) == len(args) + len(kwargs) else None
            )  # no TypeError
            return own_forward(*args, **kwargs) if answer is None else answer

    def generate(*args: Any, **kwargs: Any) -> Any:
        with accelerated.generate():
            others = len(args) > 2 or any(kwargs.get(name) is not None for name in _OTHERS_WORK)
            if others or not spins or not isinstance(given_cache(keyword, kwargs), QuireCache):
                return own_generate(*args, **kwargs)
            outside = here.torch_threads
            outside.append(outside[-1] if outside else torch.get_num_threads())
            try:
                with one_torch_thread():
                    return own_generate(*args, **kwargs)
            finally:
                outside.pop()

    return patch_methods(model, forward=forward, generate=generate)


def _is_compiled() -> bool:
    """Whether torch.compile runs what runs in this thread: traced, or called by what was traced."""
    if "torch._dynamo" not in sys.modules:
        return False
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() or callable(frames.get_eval_frame_callback())


class _ThreadState(threading.local):
    """torch_threads: of torch outside of each `generate` under way in this thread."""

    def __init__(self) -> None:
        self.torch_threads: list[int] = []


class _Steps:
    """Forwards of one prepared model that are Quire's. Called with the model's lock held."""

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
        """The forward's answer to these keywords; None where it is the model's own to give."""
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
        pads = _pads(given.get("attention_mask"), ids.shape[0], length + ids.shape[1], self._prepared.backend)
        positions = _positions(given.get("position_ids"), ids.shape, length)
        if pads is None or positions is None or (self._counts_padding and pads.any()):
            return None
        return self._run(cache, ids, positions, pads, min(kept, ids.shape[1]) or ids.shape[1])

    def _run(
        self, cache: QuireCache, ids: torch.Tensor, positions: torch.Tensor, pads: np.ndarray, kept: int
    ) -> CausalLMOutputWithPast | None:
        storage = self._storage_of(cache)
        cache.check_whole()
        self._settle_offsets(cache)
        storage.open(ids.shape[0])
        step = storage.step(ids, positions, pads, kept)
        if step is None:
            return None
        if storage.paged is None:
            storage.paged = self._prepared.cache_over(
                cast(Any, storage)
            )  # the part of a Storage that a forward uses
            storage.paged.key_offsets = cache.key_offsets
        logits = self._prepared.forward(step.forward, storage.paged)
        storage.stored(ids.shape[1])
        if cache.filled_by is None:
            cache.filled_by = self._model
        answer: dict[str, Any] = {
            "logits": _in_form(logits, step.logits_at, ids.shape[0] * kept).view(ids.shape[0], kept, -1),
            _OUTPUT_KEYWORD: cache,
        }
        return CausalLMOutputWithPast(**answer)

    def _settle_offsets(self, cache: QuireCache) -> None:
        """Have it known what is taken off keys of a cache that is empty."""
        formats = cache.formats
        if formats.is_known:
            return
        spec = formats.spec_over(self._prepared.spec)
        kinds = tuple((layer.k_format, layer.v_format) for layer in spec.layers)
        found = self._offsets.get(kinds)
        if found is None:
            found = self._offsets[kinds] = measure_key_offsets(self._prepared, spec)
            if found.left_out:
                _log.warning(
                    "%s: layers %s of a QuireCache keep K and V in %s: their keys have channels far from zero, which "
                    "cannot be taken off beside sinks or a soft cap",
                    *(spec.name, ", ".join(map(str, sorted(found.left_out))), spec.dtype),
                )
        is_open = any(layer.is_initialized for layer in cache.row_layers)  # a first step was interrupted
        formats.take(found.by_layer, frozenset() if is_open else found.left_out)

    def _serves(self, cache: QuireCache, num_rows: int) -> bool:
        """Whether the cache is one of this model's shape, or empty."""
        layers, prepared = self._prepared.spec.layers, self._prepared
        storage = self._storages.get(cache)
        if storage is not None and storage.is_open(num_rows):
            return True  # it was, and has the same rows
        if len(cache.layers) != len(layers):
            return False
        theirs, ours = cache.backend, prepared.backend
        if theirs.name != ours.name and not (theirs.is_host and ours.is_host):
            how = "without backend=" if ours.is_host else f'with storage="growing", backend={ours.name!r}'
            raise ArgumentError(
                f"expected a QuireCache in memory that backend {ours.name!r}, which runs the model, reads, got one of "
                f"backend {theirs.name!r}; make it {how}, or restore(model)"
            )
        if cache.key_offsets and sees_offsets(prepared.loaded.model):
            return False  # measured by the model's own forward, or given: kernels cannot add them back
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
            detach = functools.partial(_drop, weakref.ref(storage))
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


def _drop(storage: weakref.ref[RowStorage]) -> None:
    """The cache has gone, or gives its memory back: nothing here holds it any more. A finalizer too, in any thread."""
    held = storage()
    if held is not None:
        held.drop()


def _pads(mask: Any, num_rows: int, length: int, backend: Device) -> np.ndarray | None:
    """Leading padding of each row, int64 [num_rows]; None for a mask that is something else.

    A row of nothing but padding is left to the model's own forward, which answers something, where that can be.
    """
    if mask is None:
        return np.zeros(num_rows, np.int64)
    if not isinstance(mask, torch.Tensor) or mask.shape != (num_rows, length) or mask.is_floating_point():
        return None
    if mask.device.type != "cpu":
        return None
    seen = mask.numpy() != 0
    pads = np.argmax(seen, axis=1)
    if not backend.is_host:
        pads[~seen.any(axis=1)] = length
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
