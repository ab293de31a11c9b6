"""The state half of a layer of a transformers cache: states (Mamba, convolutions, delta nets) within `kv_memory`.

`LinearAttentionLayer` defines and updates states. This class counts them against the common limit of the cache and its
forks before their memory is taken, forks them, selects rows, and gives them back. Not an owner of memory: the tensors
are torch's own, `RowMemory` counts them. Not a complete transformers layer: `layer_kinds` makes those.

Invariants
    S1  the bytes counted for a layer are at least those of its states. They are equal after each update; with a
        recorded past, between two calls of `crop`.
    S2  the tensors belong to the layer alone: no tensor keeps a larger one alive, and no fork shares them.
    S3  a call that is refused before it computes leaves the states unchanged; a call without memory tells the cache,
        which then is empty or refuses to continue (Q2).

Threads: as for the cache; the memory's lock guards counting; giving back needs no lock (a finalizer does it).

Cost: some 8 us an update in addition to transformers' own; a fork copies the states.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from transformers.cache_utils import LinearAttentionLayer

from quire.errors import ArgumentError, CapacityError
from quire.hf.layer_rows import RowMemory
from quire.sizes import format_size

__all__ = ["STATES", "BoundStates", "StateCharge", "StateOwner"]

STATES = ("conv_states", "recurrent_states")


class StateOwner(Protocol):
    """The members of a state layer's cache that it uses; `QuireCache` describes them."""

    memory: RowMemory

    def check_state_step(self, layer: BoundStates) -> None: ...

    def state_refused(self, layer: BoundStates, *, is_first: bool) -> None: ...


class StateCharge:
    """Bytes of a `RowMemory`'s limit that states take; freeing the object gives them back."""

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def resize(self, num_bytes: int, purpose: str = "states") -> None:
        """Count `num_bytes`. *raises:* CapacityError: no room for `purpose`; nothing has changed."""
        more = num_bytes - self.num_bytes
        if more > 0:
            self._memory.take_state(more, purpose)
        elif more < 0:
            self._memory.give_state(-more)
        self.num_bytes = num_bytes

    def split(self, num_bytes: int) -> StateCharge:
        """Move `num_bytes` of this charge to a new one."""
        other = StateCharge(self._memory)
        self.num_bytes -= num_bytes
        other.num_bytes = num_bytes
        return other

    def close(self) -> None:
        self.resize(0)

    __del__ = close


class BoundStates:
    """See the module's text; mixed into each kind of transformers' layers with states (`layer_kinds`).

    conv_states, recurrent_states: by number of the state, [B, ..., width] and [B, ...], None before the first.
    """

    index: int
    number_of_states: int
    conv_states: dict[int, torch.Tensor | None]
    recurrent_states: dict[int, torch.Tensor | None]
    is_conv_states_initialized: dict[int, bool]
    is_recurrent_states_initialized: dict[int, bool]
    has_previous_state: dict[int, bool]
    conv_kernel_size: dict[int, int | None]
    device: Any
    dtype: Any
    record_past: bool

    def attach_states(self, cache: StateOwner, index: int) -> None:
        """Attach the states to layer `index` of `cache`."""
        self.index = index
        self._owner_of_states = weakref.ref(cache)
        self.charge = StateCharge(cache.memory)
        # Whether earlier columns of a convolution state, which a `crop` may need, were dropped.
        self._is_cut = dict.fromkeys(range(self.number_of_states), False)

    # Contents

    def tensors(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The present tensors of `STATES`: name, number of the state, tensor."""
        for name in STATES:
            for number, state in getattr(self, name).items():
                if state is not None:
                    yield name, number, state

    @property
    def has_states(self) -> bool:
        return any(True for _ in self.tensors())

    @property
    def num_state_rows(self) -> int:
        """Rows of the batch; 0 without a state."""
        return next((len(state) for _, _, state in self.tensors()), 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states."""
        return sum(state.nbytes for _, _, state in self.tensors())

    def bytes_behind(self, num_new: int) -> int:
        """Bytes of the states after `num_new` more tokens: more than now if the past is recorded."""
        if not self.record_past:
            return self.state_bytes
        row = sum(_column_bytes(state) for name, _, state in self.tensors() if name == "conv_states")
        return self.state_bytes + num_new * row

    def saved(self, name: str, number: int) -> torch.Tensor | None:
        """A state without the past recorded for `crop`, as the next step needs it and a file stores it."""
        state = getattr(self, name)[number]
        width = self.conv_kernel_size[number]
        if state is None or name != "conv_states" or width is None:
            return state
        kept = state[..., -width:]
        return torch.nn.functional.pad(kept, (width - kept.shape[-1], 0))

    # Steps

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As in transformers: put [B, ..., T] behind the state. Returns the old state followed by it, [B, ..., width +
        T].

        Raises:
            ArgumentError: another batch, channels or device than stored, a requested gradient, or a cache whose last
                step failed halfway.
            CapacityError: no memory (S3).
        """
        is_first = not self.has_previous_state[state_idx]
        self._check_step(conv_states, "conv_states", state_idx, -1)
        try:
            if self.record_past:
                old = self.conv_states[state_idx]
                more = conv_states.nbytes - (0 if old is None or not is_first else old.nbytes)
                self._reserve(self.state_bytes + more)
            full = LinearAttentionLayer.update_conv_state(
                self,  # type: ignore[arg-type]
                conv_states,
                state_idx,
                conv_kernel_size=conv_kernel_size,
                **kwargs,
            )
            if self.record_past:
                self.conv_states[state_idx] = _copy_of(full)
                self._is_cut[state_idx] &= not is_first
            else:
                self._is_cut[state_idx] = True
        except (CapacityError, RuntimeError) as error:
            self._raise_refusal(error, is_first=is_first)
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As in transformers: replace the state by [B, ...]; returns the stored state. *raises:* as
        `update_conv_state`."""
        is_first = not self.is_recurrent_states_initialized[state_idx]
        self._check_step(recurrent_states, "recurrent_states", state_idx, None)
        try:
            return LinearAttentionLayer.update_recurrent_state(
                self,  # type: ignore[arg-type]
                recurrent_states,
                state_idx,
                **kwargs,
            )
        except (CapacityError, RuntimeError) as error:
            self._raise_refusal(error, is_first=is_first)

    def open_states(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """`LinearAttentionLayer.lazy_initialization`: zero states for tensors of these shapes. *raises:*
        CapacityError."""
        for name, tensor in zip(STATES, (conv_states, recurrent_states), strict=True):
            if tensor is None:
                continue
            shape = tensor.shape
            if name == "conv_states":
                width = shape[-1] if conv_kernel_size is None else conv_kernel_size
                shape = (*shape[:-1], width)
                self.conv_kernel_size[state_idx] = width
            num_bytes = tensor.dtype.itemsize
            for size in shape:
                num_bytes *= size
            self._reserve(self.state_bytes + num_bytes)
            self._set(name, state_idx, torch.zeros(shape, dtype=tensor.dtype))

    def _set(self, name: str, number: int, state: torch.Tensor) -> None:
        getattr(self, name)[number] = state
        getattr(self, f"is_{name}_initialized")[number] = True
        if self.device is None:
            self.dtype, self.device = state.dtype, state.device

    def _check_step(self, tensor: torch.Tensor, name: str, number: int, stop: int | None) -> None:
        """*raises:* ArgumentError: `tensor` does not fit the state; shapes are compared up to dimension `stop`."""
        owner = self._owner_of_states()
        if owner is None:
            raise ArgumentError("expected a layer of a QuireCache that is in use; its cache is gone")
        where = f"layer {self.index} of a QuireCache"
        if tensor.device.type != "cpu":
            raise ArgumentError(
                f"expected {name} on the CPU in {where}, got {tensor.device}; its memory is the CPU's: move the model "
                "with model.to('cpu')"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"expected {name} without a gradient in {where}; it writes in place: run the model under "
                "torch.no_grad()"
            )
        state = getattr(self, name)[number]
        if state is not None and tensor.shape[:stop] != state.shape[:stop]:
            raise ArgumentError(
                f"expected {name} {_shape_text(state, stop)} in {where}, as in its stored states, got "
                f"{_shape_text(tensor, stop)}; reset() the cache, make one for this model, or fork it for each batch"
            )
        owner.check_state_step(self)

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > self.charge.num_bytes:
            self.charge.resize(num_bytes, f"the states of layer {self.index}")

    def _raise_refusal(self, error: Exception, *, is_first: bool) -> NoReturn:
        """Tell the cache that a step ends here, and raise the error."""
        owner = self._owner_of_states()
        if owner is not None:
            owner.state_refused(self, is_first=is_first)
        if isinstance(error, CapacityError) or "allocate" not in str(error):
            raise error
        raise CapacityError(
            f"cannot take memory from the operating system for the states of layer {self.index} of a QuireCache "
            f"({format_size(self.state_bytes)} in use there): {str(error).splitlines()[0]}"
        ) from error

    # What one does with a cache.

    def check_crop_states(self, tokens_to_remove: int) -> None:
        """*raises:* ArgumentError: `crop_states` cannot do that; nothing was changed."""
        if not self.record_past:
            raise ArgumentError(
                "expected past recording where a model with states is cropped: call activate_past_recording() first"
            )
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"expected a count of 0 or below for crop, -n forgets the last n tokens, got {tokens_to_remove}"
            )
        if not tokens_to_remove:
            return
        if any(self.is_recurrent_states_initialized.values()):
            raise ArgumentError(
                "expected no recurrent states in a cropped cache, as they combine all tokens; fork() the cache before "
                "the tokens, and continue with the fork"
            )
        for number, state in self.conv_states.items():
            if state is None:
                raise ArgumentError("expected a filled cache to crop, got one without states")
            left = state.shape[-1] + tokens_to_remove
            if left < (self._width(number) if self._is_cut[number] else 0):
                raise ArgumentError(
                    f"expected to crop at most the {max(0, left - tokens_to_remove - self._width(number))} tokens that "
                    f"the state of layer {self.index} has recorded since the last crop, got {tokens_to_remove}; fork() "
                    "the cache before the tokens, and continue with the fork"
                )

    def crop_states(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, and the past recorded for it."""
        for number, state in self.conv_states.items():
            if state is None:
                continue
            stop = state.shape[-1] + tokens_to_remove
            start = max(0, stop - self._width(number))
            if (start, stop) != (0, state.shape[-1]):
                self.conv_states[number] = _copy_of(state[..., start:stop])
                self._is_cut[number] |= start > 0
        self.charge.resize(self.state_bytes)

    def _width(self, number: int) -> int:
        return self.conv_kernel_size[number] or 0

    def reset_states(self) -> None:
        """Forget the states and give their memory back."""
        for number in range(self.number_of_states):
            self.conv_states[number] = self.recurrent_states[number] = self.conv_kernel_size[number] = None
            self.is_conv_states_initialized[number] = self.is_recurrent_states_initialized[number] = False
            self.has_previous_state[number] = self._is_cut[number] = False
        self.charge.close()

    def choose_states(self, order: Sequence[int]) -> None:
        """Row r becomes what row `order[r]` was. `charge` already counts additional rows."""
        rows = torch.tensor(order, dtype=torch.int64)
        for name, number, state in list(self.tensors()):
            getattr(self, name)[number] = state.index_select(0, rows)
        self.charge.resize(self.state_bytes)

    def copy_states(self, other: BoundStates, charge: StateCharge) -> None:
        """Copy the states of `other`; `charge` already counts them."""
        self.charge = charge
        for name, number, state in other.tensors():
            self._set(name, number, _copy_of(state))
        self.has_previous_state = dict(other.has_previous_state)
        self.conv_kernel_size = dict(other.conv_kernel_size)
        self._is_cut = dict(other._is_cut)

    def fill_state(self, name: str, number: int, state: torch.Tensor) -> None:
        """Set a state of `STATES` that a file has; the layer owns it, and `charge` already counts it."""
        self._set(name, number, state)
        if name == "conv_states":
            self.has_previous_state[number] = True
            self.conv_kernel_size[number] = state.shape[-1]
        self._is_cut[number] = True


def _copy_of(state: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own (S2)."""
    return state.detach().clone(memory_format=torch.contiguous_format)


def _column_bytes(state: torch.Tensor) -> int:
    return state.nbytes // state.shape[-1] if state.shape[-1] else 0


def _shape_text(state: torch.Tensor, stop: int | None) -> str:
    return f"[{', '.join(map(str, state.shape[:stop]))}{', tokens' if stop else ''}]"
