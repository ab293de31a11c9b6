"""The record of a prepared model: the facts that its proof rests on, and whether they still hold.

    of each module    its class, the class's forward, a forward of the object's own, the simple attributes (numbers,
                      texts, containers of such: epsilons, scalings, an adapter's name and state), the config
    of each tensor    parameters and buffers: place in memory, shape, dtype, device; number of writes; a hash of the
                      bytes of a small one (norms, biases), since torch does not count a write through `.data`. Packed
                      weights (`packed_parameter`) count every write. A device hashes the bytes of its tensors itself,
                      all into one number.
    in addition       hooks, and whether a module is in training mode: `ModelChange` has fields for them

Values that change while the model runs (a rotary embedding that notes the longest row) are left out: they differ
between `facts` before and after the proof's forwards. Large dense weights (experts that are not packed) are hashed by
samples: a write to single rows through `.data` may be missed.

Cost: `compare` takes about 0.2 ms for an unchanged model of 28 layers, tens of ms for a changed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from quire.modules.hooks import global_hooks, hooks_on
from quire.modules.module_patch import QUIRE_NAMES, original_class
from quire.weights.packed_parameter import LazyDenseWeight, PackedParameter

__all__ = ["ModelChange", "ModelRecord", "behaviour", "facts"]

_HASHED_WHOLE = 64 << 10  # bytes
_NUM_SAMPLES = 4096

# Entries of a module's __dict__ that are recorded apart from its attributes, or that do not affect its output.
_TORCHS = frozenset(nn.Module().__dict__) | QUIRE_NAMES | {
    "_is_hf_initialized", "_output_capturing_hooks_installed", "warnings_issued", "generation_config",
    "_quire_hold", "_compiled_call_impl", "name_or_path",
}  # fmt: skip
# Fields of a config that affect how a forward runs, not its numbers.
_INCIDENTAL = frozenset({"_attn_implementation_internal", "_experts_implementation_internal", "_commit_hash"})
_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, complex)


class ModelChange(NamedTuple):
    """changed: description of the first difference from the record, or None. hooks: all forward hooks on the model now.
    training: whether a module that behaves differently in training is in training mode."""

    changed: str | None
    hooks: tuple[Any, ...]
    training: bool


class ModelRecord:
    """Record of the present state of `model`. initial: its facts, if known. volatile: names of facts to ignore."""

    def __init__(
        self, model: nn.Module, initial: dict[str, Any] | None = None, volatile: frozenset[str] = frozenset()
    ) -> None:
        self._model, self._volatile = model, volatile
        self._record(facts(model) if initial is None else initial)

    def compare(self) -> ModelChange:
        if not self._is_same():
            now = facts(self._model)
            changed = _difference(self._facts, now, self._volatile)
            if changed is not None:
                return ModelChange(changed, _hooks(self._model), _in_training(self._model))
            self._record(now)
        return ModelChange(None, self._hooks, self._training)

    def release(self) -> None:
        """Let go of the memory of the weights, which leave a device now. `compare` then goes by the facts alone."""
        self._bytes, self._on_device = [], None

    def _record(self, now: dict[str, Any]) -> None:
        model = self._model
        modules = list(model.modules())
        self._facts = now
        self._hooks, self._training = _hooks(model), _in_training(model)
        # For the quick comparison: every object that a module refers to, in dictionary order.
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        for module in modules:
            self._dicts += [
                module.__dict__,
                module._parameters,
                module._buffers,
                module._modules,
                module._forward_hooks,
                module._forward_pre_hooks,
            ]
            for name, value in module.__dict__.items():
                if name not in _TORCHS:
                    self._add_containers(value)
        torch_module: Any = nn.modules.module
        self._dicts += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._packed: list[LazyDenseWeight] = []
        self._dense: list[tuple[torch.Tensor, int]] = []
        small: list[Any] = []
        on_device: list[torch.Tensor] = []
        for _, tensor in _tensors(model):
            if isinstance(tensor, PackedParameter):
                self._packed.append(tensor.lazy_weight)
            elif _has_bytes(tensor):
                self._dense.append((tensor, tensor.data_ptr()))
                if tensor.device.type == "cpu":
                    small.append(_bytes(tensor).numpy())
                else:
                    on_device.append(_sampled(_bytes(tensor)))
        self._bytes, self._on_device = small, _DeviceHash(on_device) if on_device else None
        self._counts = self._tensor_states()
        self._objects = self._attribute_values()
        self._classes = [(module, type(module)) for module in modules]
        self._forwards = [(cls, getattr(cls, "forward", None)) for cls in {type(m) for m in modules}]

    def _add_containers(self, value: Any) -> None:
        if type(value) is list:
            self._lists.append(value)
            for inner in value:
                self._add_containers(inner)
        elif type(value) is dict:
            self._dicts.append(value)
            for inner in value.values():
                self._add_containers(inner)
        elif isinstance(value, PreTrainedConfig) and not any(
            value.__dict__ is known for known in self._dicts
        ):
            self._dicts.append(value.__dict__)
            for inner in value.__dict__.values():
                self._add_containers(inner)

    def _is_same(self) -> bool:
        try:
            return (
                all(type(module) is cls for module, cls in self._classes)
                and all(getattr(cls, "forward", None) is forward for cls, forward in self._forwards)
                and self._objects == self._attribute_values()
                and self._counts == self._tensor_states()
            )
        except Exception:  # objects that cannot be compared count as changed
            return False

    def _attribute_values(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable(self._lists)]

    def _tensor_states(self) -> list[Any]:
        for packed in self._packed:
            if packed.dense is not None or packed._copy is not None:
                packed.settle()
        return [
            *[packed.num_writes for packed in self._packed],
            *[tensor.data_ptr() == place for tensor, place in self._dense],
            *[_version(tensor) for tensor, _ in self._dense],
            *[_hash(_sampled(view)) for view in self._bytes],
            0 if self._on_device is None else self._on_device.value(),
        ]


class _DeviceHash:
    """A hash of the bytes of `views`, uint8 on one device: the sum of their words times fixed odd numbers, modulo 2^64.

    Cost: a copy of the bytes on the device, and one of 8 bytes to this machine.
    """

    def __init__(self, views: list[torch.Tensor]) -> None:
        num_bytes = sum(map(len, views))
        self._views = [*views, views[0].new_zeros(-num_bytes % 8)]
        draw = np.random.default_rng(1).integers(-(2**63), 2**63, -(-num_bytes // 8), np.int64) | 1
        self._factors = torch.from_numpy(draw).to(views[0].device)

    def value(self) -> int:
        return int((torch.cat(self._views).view(torch.int64) * self._factors).sum())


def facts(model: nn.Module) -> dict[str, Any]:
    """Comparable facts about `model`, by description."""
    entries: dict[str, Any] = {}
    for name, module in model.named_modules():
        place = f"{name}." if name else ""
        cls = original_class(module)
        entries[f"the class of {name or 'the model'}"] = (cls, getattr(cls, "forward", None))
        for attribute, value in module.__dict__.items():
            if attribute not in _TORCHS and (simple := _simple(value)) is not None:
                entries[place + attribute] = simple[0]
        if "forward" in module.__dict__:
            entries[f"the forward of {name or 'the model'}"] = module.__dict__["forward"]
        entries[f"the parts of {name or 'the model'}"] = tuple(
            (inner, id(child)) for inner, child in module._modules.items()
        )
    for name, tensor in _tensors(model):
        entries[name] = _tensor_fact(tensor)
    return entries


def behaviour(model: nn.Module) -> str:
    """The simple attributes of the modules and their classes, as text that is equal in every process."""
    lines = []
    for name, module in model.named_modules():
        cls = original_class(module)
        lines.append(f"{name} {cls.__module__}.{cls.__qualname__}")
        for hook in [
            *hooks_on(module),
            *([module.__dict__["forward"]] if "forward" in module.__dict__ else []),
        ]:
            lines.append(
                f"  calls {getattr(hook, '__module__', None)}.{getattr(hook, '__qualname__', type(hook))}"
            )
        if isinstance(module, PreTrainedModel):
            continue
        for attribute, value in sorted(module.__dict__.items()):
            if attribute in _TORCHS or "cached" in attribute or callable(value):
                continue
            if not isinstance(value, PreTrainedConfig) and (simple := _simple(value)) is not None:
                lines.append(f"  {attribute} {simple[0]!r}")
    return "\n".join(lines)


def _difference(before: dict[str, Any], now: dict[str, Any], volatile: frozenset[str]) -> str | None:
    if before == now:
        return None
    for name in chain(before, now):
        if name in volatile:
            continue
        if name not in now:
            return f"{name} is gone"
        if name not in before:
            return f"{name} is new"
        if before[name] != now[name]:
            return f"{name} has changed"
    return None


def _hooks(model: nn.Module) -> tuple[Any, ...]:
    hooks = [global_hooks(), *(hooks_on(module) for module in model.modules())]
    return tuple(chain.from_iterable(hooks))


def _in_training(model: nn.Module) -> bool:
    return any(module.training and _differs_in_training(module) for module in model.modules())


def _differs_in_training(module: nn.Module) -> bool:
    """Whether training mode may change its output. torch's own modules are known; adapters come in training mode, and
    their only randomness is torch's dropout."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    package = original_class(module).__module__
    if package.startswith("torch."):
        return isinstance(module, nn.modules.batchnorm._NormBase | nn.RReLU | nn.RNNBase)
    return not package.startswith("peft.")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensor_fact(tensor: torch.Tensor) -> tuple[Any, ...]:
    description = (tuple(tensor.shape), tensor.dtype, str(tensor.device))
    if isinstance(tensor, PackedParameter):
        tensor.lazy_weight.settle()
        return (*description, id(tensor.lazy_weight), tensor.lazy_weight.num_writes)
    if not _has_bytes(tensor):
        return (*description, type(tensor), id(tensor), _version(tensor))
    view = _bytes(tensor)
    num_writes = 0 if view.numel() <= _HASHED_WHOLE else _version(tensor)
    return (*description, tensor.data_ptr(), num_writes, _hash(_sampled(view).cpu().numpy()))


def _has_bytes(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n]: a view of its memory if that is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _sampled(view: Any) -> Any:
    """view: uint8 [n], of numpy or torch."""
    num_bytes = len(view)
    return view if num_bytes <= _HASHED_WHOLE else view[:: max(1, num_bytes // _NUM_SAMPLES) | 1]


def _hash(values: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).data)


def _simple(value: Any) -> tuple[Any] | None:
    """(a comparable value,), or None for a value that is recorded elsewhere or does not matter."""
    if isinstance(value, _SIMPLE):
        return (value,)
    if isinstance(value, list | tuple):
        return (tuple(_simple(inner) for inner in value),)
    if isinstance(value, dict):
        return (tuple((str(key), _simple(inner)) for key, inner in value.items()),)
    if isinstance(value, set | frozenset):
        return (tuple(sorted(map(str, value))),)
    if isinstance(value, PreTrainedConfig):
        fields = {name: inner for name, inner in value.__dict__.items() if name not in _INCIDENTAL}
        return _simple(fields)
    if callable(value) and not isinstance(value, nn.Module):
        return (getattr(value, "__qualname__", type(value)),)
    return None
