"""A packed weight, and the Parameter that stands for it in torch.

`PackedParameter` replaces a Parameter within the very same Python object (`torch.utils.swap_tensors`): same name,
shape, dtype and device, no memory of its own. So parameters(), state_dict(), optimizers, adapters and other references
to the object see a weight; their operations apply to the `LazyDenseWeight` behind it, which its aliases (`.data`,
`.detach()`, entries of state_dict) share. Its states:

    packed    the kernels' form is the weight. Reading unpacks a copy.
    lent      a caller has memory of the weight (a view, a pointer): dense memory is the weight from then on, and the
              modules compute from it. If its bytes are unchanged, `settle` drops it again.
    written   as lent, and the packed form is outdated: gone.

Not a lock. Invariants
    H1  a read gives the weight's bits, a write is never lost; `num_writes` has grown when the bits may differ.
    H2  a module that computes from the packed form has it as `_packed`, or None there while dense memory is the weight.
    H3  after `restore` the object is an ordinary Parameter again, with the bits, the gradient and the attributes it
        has by then.
    H4  a copy or a pickle of the parameter is an ordinary one.

Cost: nothing for modules that use `_packed`; an operator of torch on the parameter unpacks, and takes 10 us more.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch import nn

__all__ = ["LazyDenseWeight", "PackedParameter", "bytes_of", "hash_of"]

aten = torch.ops.aten
_use_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]
_READS_BEFORE_CACHED = 2


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bits of a dense tensor, a buffer; a copy if it is on another device."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def hash_of(tensor: torch.Tensor) -> int:
    """Hash of its bits; equal bits give equal hashes."""
    return xxhash.xxh3_64_intdigest(bytes_of(tensor))


class LazyDenseWeight:
    """See the module's text.

    packed: the kernels' form, which the modules have as `_packed`; None for a weight that is only watched, and then
    `dense` is given. unpack: returns the weight unpacked, in the Parameter's shape, in memory of its own.
    """

    def __init__(
        self,
        *,
        packed: Any = None,
        unpack: Callable[[], torch.Tensor] | None = None,
        dense: torch.Tensor | None = None,
    ) -> None:
        self.packed, self.dense = packed, dense
        self.num_writes = 0
        self.users: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._unpack = unpack
        self._copy: torch.Tensor | None = None  # of a packed weight that is read repeatedly
        self._num_reads = 0
        self._hash: int | None = None  # of dense memory when it was first lent
        self._base_references = 0 if dense is None else _references(dense)

    def read(self) -> torch.Tensor:
        """The weight, which the caller neither writes nor passes on for writing."""
        if self.dense is not None:
            return self.dense
        if self._copy is not None:
            return self._copy
        dense = self._unpacked()
        self._num_reads += 1
        if self._num_reads > _READS_BEFORE_CACHED:
            self._copy = dense
        return dense

    def lend(self) -> torch.Tensor:
        """The weight's own memory, for a caller that may keep views of it."""
        dense = self._dense_memory()
        if self._hash is None and dense.device.type == "cpu":
            self._hash = hash_of(dense)
        return dense

    def write(self) -> torch.Tensor:
        """The weight's own memory, about to be written."""
        dense = self._dense_memory()
        self.num_writes += 1
        self.packed = self._unpack = None
        return dense

    def settle(self) -> None:
        """Detect writes to lent memory, and drop it once no view of it is left."""
        self._copy, self._num_reads = None, 0
        dense = self.dense
        if dense is None or self._hash is None or dense.device.type != "cpu":
            return
        current_hash = hash_of(dense)
        if current_hash != self._hash:
            self.write()
            self._hash = current_hash
        if _references(dense) > self._base_references:
            return
        self._hash = None
        if self.packed is not None:
            self.dense = None
            self._set_packed(self.packed)

    def _unpacked(self) -> torch.Tensor:
        assert self._unpack is not None
        with torch.inference_mode(False):  # a caller within that mode may keep the tensor beyond it
            return self._unpack()

    def _dense_memory(self) -> torch.Tensor:
        if self.dense is None:
            self.dense = self._unpacked() if self._copy is None else self._copy
            self._copy = None
            self._base_references = _references(self.dense)
            self._set_packed(None)
        return self.dense

    def _set_packed(self, packed: Any) -> None:
        for module in self.users:
            if module.__dict__.get("_lazy_weight") is self:
                module.__dict__["_packed"] = packed


def _references(tensor: torch.Tensor) -> int:
    return _use_count(tensor.untyped_storage()._cdata)


class PackedParameter(torch.Tensor):
    """The Parameter that stands for `lazy_weight`, or, where `_is_param` is not set, an alias of it."""

    lazy_weight: LazyDenseWeight
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, lazy_weight: LazyDenseWeight, like: torch.Tensor, requires_grad: bool = False
    ) -> PackedParameter:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
        )
        self.lazy_weight = lazy_weight
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def replace_parameter(
        cls, parameter: nn.Parameter, lazy_weight: LazyDenseWeight, like: torch.Tensor
    ) -> bool:
        """Put `lazy_weight` behind the object `parameter`, of which `like` is an alias; False if torch refuses."""
        new = cls(lazy_weight, like, parameter.requires_grad)
        vars(new).update(parameter.__dict__, lazy_weight=lazy_weight, _is_param=True)
        new.grad = parameter.grad
        return _swap(parameter, new)

    def restore(self) -> None:
        """Turn this object into the ordinary Parameter that it would be by now."""
        lazy_weight = self.lazy_weight
        dense = lazy_weight._dense_memory()
        ordinary = nn.Parameter(dense, requires_grad=self.requires_grad)
        vars(ordinary).update(
            {name: value for name, value in self.__dict__.items() if name not in ("lazy_weight", "_is_param")}
        )
        ordinary.grad = self.grad
        if not _swap(self, ordinary):
            gc.collect()
            # If a graph still references the object, it stays a PackedParameter on dense memory.
            _swap(self, ordinary)
        lazy_weight.packed = lazy_weight._unpack = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default or func is aten.alias.default:
            return args[0]._alias()
        arguments = func._schema.arguments
        opened = [
            _dense_arguments(value, about.alias_info) for value, about in zip(args, arguments, strict=False)
        ]
        infos = {about.name: about.alias_info for about in arguments}
        named = {name: _dense_arguments(value, infos.get(name)) for name, value in kwargs.items()}
        result = func(*opened, **named)
        for about in func._schema.returns:
            if about.alias_info is not None and about.alias_info.is_write and len(func._schema.returns) == 1:
                return _written_argument(about.alias_info, arguments, args, kwargs)
        return result

    def _alias(self) -> PackedParameter:
        with torch.inference_mode(False):  # an inference tensor has no version counter to share
            return PackedParameter(self.lazy_weight, self)

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """As torch's: other memory behind this object, not behind its aliases."""
        if isinstance(value, PackedParameter):
            if value.lazy_weight is self.lazy_weight:
                return
            value = value.lazy_weight.lend()
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        before, self.lazy_weight = self.lazy_weight, LazyDenseWeight(dense=value.detach())
        for module in list(before.users):
            if module.__dict__.get("_lazy_weight") is before:
                self.lazy_weight.users.add(module)
                module.__dict__.update(_lazy_weight=self.lazy_weight, _packed=None)

    # Methods that access memory without torch's operators.

    def data_ptr(self) -> int:
        return self.lazy_weight.lend().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.lazy_weight.lend().untyped_storage()

    def storage(self) -> Any:
        return self.lazy_weight.lend().storage()

    def numpy(self, **options: Any) -> Any:
        if self.requires_grad:
            return nn.Parameter(self.lazy_weight.read()).numpy(**options)  # torch's own refusal
        return self.lazy_weight.lend().numpy(**options)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        dense: Any = self.lazy_weight.lend()
        return dense.__array__(*arguments, **options)

    def __dlpack__(self, **options: Any) -> Any:
        return self.lazy_weight.lend().__dlpack__(**options)

    def tolist(self) -> Any:
        return self.lazy_weight.read().tolist()

    def share_memory_(self) -> PackedParameter:
        self.lazy_weight.write().share_memory_()
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._ordinary())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            dense = self.lazy_weight.read().clone()
            memo[id(self)] = self._like_self(dense)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)

    def _ordinary(self) -> torch.Tensor:
        return self._like_self(self.lazy_weight.lend())

    def _like_self(self, dense: torch.Tensor) -> torch.Tensor:
        is_parameter = self.__dict__.get("_is_param", False)
        return nn.Parameter(dense, requires_grad=self.requires_grad) if is_parameter else dense


def _swap(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Exchange the contents of the two objects; False, without a change, if torch finds another reference to one of
    them."""
    with contextlib.suppress(RuntimeError):
        torch.utils.swap_tensors(old, new)
        return True
    return False


def _dense_arguments(value: Any, info: Any) -> Any:
    """The argument `value` with packed weights replaced by dense memory. info: the operator's alias annotation."""
    if isinstance(value, PackedParameter):
        lazy_weight = value.lazy_weight
        return (
            lazy_weight.read()
            if info is None
            else lazy_weight.write()
            if info.is_write
            else lazy_weight.lend()
        )
    if isinstance(value, list | tuple):
        return type(value)(_dense_arguments(item, info) for item in value)
    return value


def _written_argument(info: Any, arguments: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The argument that the operator wrote to and returns."""
    for index, about in enumerate(arguments):
        if about.alias_info is not None and about.alias_info.before_set == info.before_set:
            return args[index] if index < len(args) else kwargs[about.name]
    raise AssertionError("expected an operator that names the argument it wrote to")
