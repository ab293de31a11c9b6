"""The form of a quantized weight: bits, groups, the types of its scales. Its size follows from it.

A reader (`readers`) gives the form of a weight from headers, before its codes are read; `form_of` gives it for a weight
in memory. Both are equal, so a plan knows the memory of a start.

Not the numbers (`weight`), nor their layout in a panel (native/kernels/quantized.hpp) or on a device, whose sizes are
repeated here.

Cost: arithmetic. `packed_dtype` reads the numbers that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.errors import ArgumentError
from quire.spec.weight_formats import Rounding
from quire.weights.codes.code_device import code_device, code_extension
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = [
    "PANEL",
    "PANEL_LAYOUT",
    "CodeForm",
    "FactorForm",
    "form_of",
    "join_forms",
    "packed_dtype",
    "require_product",
    "rounded_form",
    "zeros_dtype",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of activations
_NUMBERS = (*_DTYPES, torch.uint8, torch.int8)  # types that panels have unchanged
_SMALLEST_GROUP, _BLOCK = 16, 32  # inputs
PANEL = 16  # outputs
PANEL_LAYOUT = 1  # raised when equal weights get other panels, so that saved ones are not read
_LINE = 64  # bytes


@dataclass(frozen=True)
class FactorForm:
    """Form of a `Factor`. fine: type of the groups' numbers. coarse: type of those shared by `ratio` groups, if any."""

    fine: torch.dtype
    coarse: torch.dtype | None = None
    ratio: int = 1

    def num_bytes(self, num_outputs: int, num_groups: int) -> int:
        """Bytes of `num_outputs` rows of a panel, each part on lines of its own."""
        total = _lines(num_outputs * num_groups * self.fine.itemsize)
        if self.coarse is not None:
            total += _lines(num_outputs * -(-num_groups // self.ratio) * self.coarse.itemsize)
        return total


@dataclass(frozen=True)
class CodeForm:
    """Form of a `QuantizedWeight`, with its terms.

    zeros: type of the zeros, one a group; None: one zero for all, or none. has_table, has_order: whether it has one.
    """

    label: str
    bits: int
    group: int
    scales: FactorForm
    zeros: torch.dtype | None = None
    minimums: FactorForm | None = None
    has_table: bool = False
    has_order: bool = False

    def num_bytes(self, num_outputs: int, num_inputs: int, backend: str | None = None) -> int:
        """`QuantizedPanels.num_bytes` of such a weight."""
        device = code_device(backend)
        if device is not None and device.pack_codes is not None:
            bytes_of = self.device_bytes
        else:
            bytes_of = self._twin_bytes if code_extension(backend) is None else self.panel_bytes
        return 8 * num_inputs * self.has_order + bytes_of(num_outputs, num_inputs)

    def panel_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Bytes of the extension's panels of such a weight."""
        is_whole = self.group == num_inputs and self.group != _SMALLEST_GROUP
        depth = -(-num_inputs // _BLOCK) * _BLOCK
        groups = 1 if is_whole else depth // self.group
        panel = depth * PANEL * self._panel_bits // 8 + self.scales.num_bytes(PANEL, groups)
        if self.minimums is not None:
            panel += self.minimums.num_bytes(PANEL, groups)
        if self.zeros is not None:
            panel += _lines(PANEL * groups * self.zeros.itemsize)
        return -(-num_outputs // PANEL) * panel

    def device_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Bytes of such a weight as a device's kernels read it (`quire.devices.cuda.laid_out_codes`)."""
        width, groups = -(-num_outputs // _BLOCK) * _BLOCK, num_inputs // self.group
        step = _SMALLEST_GROUP if self.group == _SMALLEST_GROUP else _BLOCK
        per_byte = 2 if self.bits <= 4 else 1
        factor_bytes = 0 if self.zeros is None else self.zeros.itemsize
        for factor in (self.scales, self.minimums):
            if factor is not None:
                is_narrow = factor.coarse is None and factor.fine in _DTYPES
                factor_bytes += factor.fine.itemsize if is_narrow else 4
        return width * (-(-num_inputs // (step * per_byte)) * step + groups * factor_bytes)

    @property
    def _panel_bits(self) -> int:
        if self.bits <= 4:
            return 4
        return 8 if self.bits > 6 or self.has_table else self.bits

    def _twin_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Bytes without the extension: a byte a code, no padding."""
        groups = num_inputs // self.group
        total = num_outputs * num_inputs + 4 * (1 << self.bits) * self.has_table
        for factor in (self.scales, self.minimums):
            if factor is not None:
                total += num_outputs * groups * factor.fine.itemsize
                total += (
                    num_outputs * groups // factor.ratio * (factor.coarse.itemsize if factor.coarse else 0)
                )
        return total + (0 if self.zeros is None else num_outputs * groups * self.zeros.itemsize)


def require_product(label: str, group: int, num_inputs: int, dtype: torch.dtype) -> None:
    """*raises:* ArgumentError: no product of `dtype` with a weight that has a scale for each `group` inputs."""
    if dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ArgumentError(f"{label}: expected a model of {names}, got {dtype}")
    if group not in (num_inputs, _SMALLEST_GROUP) and group % _BLOCK:
        raise ArgumentError(
            f"{label}: expected a scale for each {_SMALLEST_GROUP} inputs, a multiple of {_BLOCK}, or all "
            f"{num_inputs}, got {group}"
        )


def form_of(weight: QuantizedWeight) -> CodeForm:
    """The form of a weight once packed: scales in two bytes if that loses nothing."""
    zeros = weight.zeros
    return CodeForm(
        weight.label,
        weight.bits,
        weight.group,
        _factor_form(weight.scales),
        zeros_dtype(zeros) if isinstance(zeros, torch.Tensor) else None,
        None if weight.minimums is None else _factor_form(weight.minimums),
        weight.table is not None,
        weight.order is not None,
    )


def join_forms(forms: Sequence[CodeForm]) -> CodeForm:
    """The form of several weights joined along their outputs (`join_weights`): scales of different types become
    float32. Orders of inputs are assumed equal.

    *raises:* ArgumentError: they are quantized in different ways.
    """
    first = forms[0]
    types = {form.scales.fine for form in forms}
    fine = types.pop() if len(types) == 1 else torch.float32
    uniform = [replace(form, label=first.label, scales=replace(form.scales, fine=fine)) for form in forms]
    if any(form != uniform[0] for form in uniform):
        labels = ", ".join(dict.fromkeys(form.label for form in forms))
        raise ArgumentError(f"expected weights quantized in one way to pack them as one, got {labels}")
    return uniform[0]


def _factor_form(factor: Factor) -> FactorForm:
    if factor.coarse is None:
        return FactorForm(packed_dtype(factor.fine))
    ratio = factor.fine.shape[1] // factor.coarse.shape[1]
    return FactorForm(packed_dtype(factor.fine), packed_dtype(factor.coarse), ratio)


def packed_dtype(values: torch.Tensor) -> torch.dtype:
    """The packed type of these scales: float16 or bfloat16 if it loses nothing."""
    if values.dtype in _NUMBERS and values.dtype is not torch.float32:
        return values.dtype
    values = values.float()
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).float(), values):
            return dtype
    return torch.float32


def zeros_dtype(zeros: torch.Tensor) -> torch.dtype:
    """The packed type of a zero for each group."""
    return torch.uint8 if zeros.dtype is torch.uint8 else torch.float32


def rounded_form(num_inputs: int, rounding: Rounding) -> CodeForm:
    """The form of a weight rounded in this way (`round_to_codes`)."""
    return CodeForm(str(rounding), rounding.bits, rounding.group_of(num_inputs), FactorForm(torch.float16))


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
