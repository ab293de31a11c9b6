"""A weight that Quire holds in another form, and the Parameter that stands for it wherever torch looks.

`PackedParameter` takes a Parameter's place within the very same Python object (`torch.utils.swap_tensors`): same name,
shape, dtype and device, no memory of its own. So parameters(), state_dict(), optimizers, adapters and whoever has kept
the object see a weight; what they do to it happens to the `LazyDenseWeight` behind it, which its aliases (`.data`,
`.detach()`, what state_dict gives) share.

    packed    the kernels' form is the weight. Reading unpacks a copy.
    lent      somebody was given memory of the weight (a view, a pointer): dense memory is the weight from then on, and
              the modules compute from it. Where its bytes have stayed what they were, `settle` packs it away again.
    written   as lent, and the packed form is another weight's: gone.

Not a lock. Invariants
    H1  a read gives the weight's bits, a write is never lost; `num_writes` has grown when the bits may be others.
    H2  a module that computes from the packed form has it as `_packed`, or None there while dense memory is the weight.
    H3  after `give_back` the object is an ordinary Parameter again, with the bits, the gradient and the attributes it
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
_READS_BEFORE_KEPT = 2


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bits of a dense tensor on the CPU, a buffer."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def hash_of(tensor: torch.Tensor) -> int:
    """Of its bits; equal bits give equal hashes."""
    return xxhash.xxh3_64_intdigest(bytes_of(tensor))


class LazyDenseWeight:
    """See the module's text.

    packed: the kernels' form, what the modules have as `_packed`; None for a weight that is only watched, and then
    `dense` is given. unpack: the weight from it, in the Parameter's shape, memory of its own.
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
        self._kept: torch.Tensor | None = None  # a copy of a packed weight that is read again and again
        self._num_reads = 0
        self._hash: int | None = None  # of dense memory, when it was first lent
        self._own_references = 0 if dense is None else _references(dense)

    def read(self) -> torch.Tensor:
        """The weight, not to be written, nor handed to anybody who may."""
        if self.dense is not None:
            return self.dense
        if self._kept is not None:
            return self._kept
        dense = self._unpacked()
        self._num_reads += 1
        if self._num_reads > _READS_BEFORE_KEPT:
            self._kept = dense
        return dense

    def lend(self) -> torch.Tensor:
        """The weight's own memory, for somebody who may keep views of it."""
        dense = self._thawed()
        if self._hash is None and dense.device.type == "cpu":
            self._hash = hash_of(dense)
        return dense

    def write(self) -> torch.Tensor:
        """The weight's own memory, about to be written."""
        dense = self._thawed()
        self.num_writes += 1
        self.packed = self._unpack = None
        return dense

    def settle(self) -> None:
        """Find out whether lent memory was written; pack away what nobody looks at any more."""
        self._kept, self._num_reads = None, 0
        dense = self.dense
        if dense is None or self._hash is None or dense.device.type != "cpu":
            return
        found = hash_of(dense)
        if found != self._hash:
            self.write()
            self._hash = found
        if _references(dense) > self._own_references:
            return
        self._hash = None
        if self.packed is not None:
            self.dense = None
            self._show(self.packed)

    def _unpacked(self) -> torch.Tensor:
        assert self._unpack is not None
        with torch.inference_mode(False):  # a forward in that mode may ask; what it gets may outlive the mode
            return self._unpack()

    def _thawed(self) -> torch.Tensor:
        if self.dense is None:
            self.dense = self._unpacked() if self._kept is None else self._kept
            self._kept = None
            self._own_references = _references(self.dense)
            self._show(None)
        return self.dense

    def _show(self, packed: Any) -> None:
        for module in self.users:
            if module.__dict__.get("_held") is self:
                module.__dict__["_packed"] = packed


def _references(tensor: torch.Tensor) -> int:
    return _use_count(tensor.untyped_storage()._cdata)


class PackedParameter(torch.Tensor):
    """The Parameter that stands for `held`, or, where `_is_param` is not set, an alias of it."""

    held: LazyDenseWeight
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, held: LazyDenseWeight, like: torch.Tensor, requires_grad: bool = False
    ) -> PackedParameter:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
        )
        self.held = held
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def take_place(cls, parameter: nn.Parameter, held: LazyDenseWeight, like: torch.Tensor) -> bool:
        """Put `held` behind the object `parameter`, of which `like` is an alias; False where torch refuses."""
        new = cls(held, like, parameter.requires_grad)
        vars(new).update(parameter.__dict__, held=held, _is_param=True)
        new.grad = parameter.grad
        return _swapped(parameter, new)

    def give_back(self) -> None:
        """Make this object the ordinary Parameter that it would be by now."""
        held = self.held
        dense = held._thawed()
        plain = nn.Parameter(dense, requires_grad=self.requires_grad)
        vars(plain).update(
            {name: value for name, value in self.__dict__.items() if name not in ("held", "_is_param")}
        )
        plain.grad = self.grad
        if not _swapped(self, plain):
            gc.collect()
            _swapped(self, plain)  # where a graph still holds it, it goes on as it is, with dense memory
        held.packed = held._unpack = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default or func is aten.alias.default:
            return args[0]._alias()
        arguments = func._schema.arguments
        opened = [_opened(value, about.alias_info) for value, about in zip(args, arguments, strict=False)]
        infos = {about.name: about.alias_info for about in arguments}
        named = {name: _opened(value, infos.get(name)) for name, value in kwargs.items()}
        result = func(*opened, **named)
        for about in func._schema.returns:
            if about.alias_info is not None and about.alias_info.is_write and len(func._schema.returns) == 1:
                return _written(about.alias_info, arguments, args, kwargs)
        return result

    def _alias(self) -> PackedParameter:
        with torch.inference_mode(False):  # whose tensors have no versions, which an alias shares
            return PackedParameter(self.held, self)

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """As torch's: other memory behind this object, not behind its aliases."""
        if isinstance(value, PackedParameter):
            if value.held is self.held:
                return
            value = value.held.lend()
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        before, self.held = self.held, LazyDenseWeight(dense=value.detach())
        for module in list(before.users):
            if module.__dict__.get("_held") is before:
                self.held.users.add(module)
                module.__dict__.update(_held=self.held, _packed=None)

    # What reads memory past torch's operators.

    def data_ptr(self) -> int:
        return self.held.lend().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.lend().untyped_storage()

    def storage(self) -> Any:
        return self.held.lend().storage()

    def numpy(self, **options: Any) -> Any:
        if self.requires_grad:
            return nn.Parameter(self.held.read()).numpy(**options)  # torch's own refusal
        return self.held.lend().numpy(**options)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        dense: Any = self.held.lend()
        return dense.__array__(*arguments, **options)

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.lend().__dlpack__(**options)

    def tolist(self) -> Any:
        return self.held.read().tolist()

    def share_memory_(self) -> PackedParameter:
        self.held.write().share_memory_()
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            dense = self.held.read().clone()
            memo[id(self)] = self._as_it_is(dense)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        return self._as_it_is(self.held.lend())

    def _as_it_is(self, dense: torch.Tensor) -> torch.Tensor:
        is_parameter = self.__dict__.get("_is_param", False)
        return nn.Parameter(dense, requires_grad=self.requires_grad) if is_parameter else dense


def _swapped(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Exchange what the two objects are; False, and nothing done, where torch finds another hold on one of them."""
    with contextlib.suppress(RuntimeError):
        torch.utils.swap_tensors(old, new)
        return True
    return False


def _opened(value: Any, info: Any) -> Any:
    """`value`, an argument, with the dense memory of held weights for them. info: what the operator says it does."""
    if isinstance(value, PackedParameter):
        held = value.held
        return held.read() if info is None else held.write() if info.is_write else held.lend()
    if isinstance(value, list | tuple):
        return type(value)(_opened(each, info) for each in value)
    return value


def _written(info: Any, arguments: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The argument that the operator wrote to and returns."""
    for index, about in enumerate(arguments):
        if about.alias_info is not None and about.alias_info.before_set == info.before_set:
            return args[index] if index < len(args) else kwargs[about.name]
    raise AssertionError("an operator that returns what it wrote names it")
