"""The base of all kinds of mixers: the fields of their states, a forward over flattened rows, its output.

A kind is a subclass in a file of its own. `match` recognises a mixer by its structure: the names of its submodules and
parameters must be exactly those of the kind, and the shapes must fit. A mixer with an additional part does not match.
Projections, norms and activations are the mixer's own submodules, called as modules, so that hooks and adapters on them
take effect; the convolution and the recurrence are `quire.recurrence`'s.

All fields are float32, those of convolutions too: inputs in 16 bits are converted exactly, and one type a slot keeps
slots, checkpoints and their bytes simple. A convolution's state is a hundredth of its layer's other state or, in short
convolutions, some KiB.

Invariants
    A1  the fields of an adapter are those that `quire.spec.state_spec` reads from the config.
    A2  a row's result depends on the rows of its own sequence alone, if that holds for the submodules.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn

from quire.errors import ArgumentError
from quire.model.state.parts import MixerParts
from quire.recurrence import CausalConvolution, RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["CONVOLUTION", "RECURRENT", "StateAdapter", "convolution_field", "has_parts", "is_silu"]

CONVOLUTION, RECURRENT = "convolution", "recurrent"  # the names of the fields
MAX_WIDTH = 8  # largest width of a convolution in quire.recurrence


class StateAdapter(ABC):
    """One mixer of a model, run over the rows of many sequences.

    Args:
        module: the mixer; it is called, not copied.
        recurrence: the backend of convolution and recurrence.
    """

    kind: ClassVar[str]
    fields: Mapping[str, tuple[int, ...]]  # shape of each state of one slot; all are float32

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        self.module: Any = module
        self.recurrence = recurrence

    @classmethod
    @abstractmethod
    def match(cls, module: nn.Module) -> bool:
        """Whether `module` is a mixer of this kind."""

    @abstractmethod
    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        """`forward` without its checks."""

    @torch.no_grad()
    def forward(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        """The mixer's output for each row.

        Args:
            hidden: [num_rows, hidden_size], the rows of all sequences of the step.
            states: each field, float32 [num_slots, *shape]; the slots of the step are updated in place.
            step: rows, slots, checkpoints, positions.

        Returns:
            [num_rows, hidden_size], of hidden's type.

        Raises:
            ArgumentError: rows that are not the step's, or states that are not the fields; nothing was changed.
        """
        if hidden.dim() != 2 or hidden.shape[0] != step.num_rows:
            raise ArgumentError(
                f"expected hidden as [{step.num_rows}, hidden_size], the rows of the step, got "
                f"{list(hidden.shape)}"
            )
        given = {name: tuple(state.shape[1:]) for name, state in states.items()}
        if given != dict(self.fields):
            raise ArgumentError(
                f"expected states [num_slots, ...] of {dict(self.fields)} for {type(self.module).__name__}, got {given}"
            )
        return self.compute_rows(hidden, states, step)

    @property
    def hidden_size(self) -> int:
        """The width of the mixer's rows."""
        return self.first_projection.in_features

    @property
    @abstractmethod
    def first_projection(self) -> Any:
        """A linear layer that takes the mixer's rows."""

    def parts(self) -> MixerParts | None:
        """The parts that one native call needs to run the mixer; None if no kernel has its kind."""
        return None

    def module_output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Output of the mixer's own forward for the rows of one text [num_rows, hidden_size], without a cache."""
        return self.module(hidden[None])[0]

    @property
    def text_lengths(self) -> tuple[int, ...]:
        """Numbers of rows, the largest last, at which everything that the mixer computes takes effect."""
        return 1, 8, 65

    def float32_copy(self) -> Self:
        """An adapter of a float32 copy of the mixer."""
        return type(self)(copy.deepcopy(self.module).float(), self.recurrence)

    def wrap_output(self, hidden: torch.Tensor) -> Any:
        """The return value of the mixer's own forward, made from its first result."""
        return hidden

    def convolve(
        self,
        conv: Any,
        x: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: RecurrenceStep,
        *,
        silu: bool,
    ) -> torch.Tensor:
        """The causal convolution `conv` (a depthwise nn.Conv1d) over rows `x` [num_rows, channels]."""
        return self.recurrence.compute(
            CausalConvolution(states[CONVOLUTION], x.contiguous(), conv.weight[:, 0], conv.bias, silu=silu),
            step,
        )


def has_parts(module: nn.Module, children: frozenset[str], parameters: frozenset[str] = frozenset()) -> bool:
    """Whether the names of the module's children and own parameters are exactly these."""
    names = {name for name, _ in module.named_children()}
    own_parameters = {name for name, parameter in module._parameters.items() if parameter is not None}
    return names == children and own_parameters == parameters


def is_silu(name: Any) -> bool:
    """Whether `name` is a config's name of SiLU."""
    return name in ("silu", "swish")


def convolution_field(conv: Any) -> tuple[int, int] | None:
    """(width - 1, channels) of a causal depthwise convolution; None if `conv` is not one, or too wide."""
    if not isinstance(conv, nn.Conv1d):
        return None
    width, channels = conv.kernel_size[0], conv.in_channels
    is_causal = conv.stride == (1,) and conv.dilation == (1,) and conv.padding == (width - 1,)
    if not is_causal or not conv.groups == channels == conv.out_channels or not 2 <= width <= MAX_WIDTH:
        return None
    return width - 1, channels
