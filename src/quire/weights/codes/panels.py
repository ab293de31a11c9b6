"""A quantized weight for linear layers and embeddings: its product, its rows, its dequantized whole.

The extension packs it in panels of codes (native/kernels/quantized.hpp); without the extension the twin
(`quantized_reference`) computes, with a byte for each code. Both give the same bits. On another device its own form
computes (`Device.pack_codes`), or the twin.

Cost: for few rows one read of the panels, 0.5 to 1 byte a value; for many one dequantization for some hundred rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from quire.devices import PackedCodes, PacksCodes
from quire.errors import ArgumentError
from quire.weights.codes.code_device import code_device, code_extension
from quire.weights.codes.code_form import PANEL, form_of, packed_dtype, require_product, zeros_dtype
from quire.weights.codes.panel_form import from_metadata, single_output, to_metadata
from quire.weights.codes.quantized_reference import multiply
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = ["QuantizedPanels"]

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class QuantizedPanels:
    """A packed weight [num_outputs, num_inputs] that is read and multiplied in `dtype`.

    backend: of the computing code, as in `code_device`. isa: a variant of the extension's kernels, for tests; None is
    the one in use. label: the format's name. num_bytes: of its codes and their scales. native: the extension's form;
    None if the twin or a device computes. device: of torch, where it lies. is_saved: whether its panels lie in memory
    that it does not own (`from_packed`, `move`).

    *raises:* ArgumentError: there is no such product; with the format's name.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        dtype: torch.dtype,
        isa: str | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        inputs = weight.num_inputs
        require_product(weight.label, weight.group, inputs, dtype)
        self.dtype = dtype
        self.label = weight.label
        self.num_outputs, self.num_inputs = weight.num_outputs, inputs
        self._order = weight.order
        self._weight: QuantizedWeight | None = None
        native, device = code_extension(backend), code_device(backend)
        self.device = torch.device("cpu") if device is None else device.torch_device
        self._packed: PackedCodes | None = None
        self.native: Any = None if native is None else _pack(native, weight, _DTYPES[dtype], isa)
        self.is_saved = False
        self._output: QuantizedWeight | None = None
        if device is not None and device.pack_codes is not None:
            self._packed = _pack_on(device.pack_codes, weight, dtype)
        elif self.native is None:
            self._weight = _narrow(weight).to(self.device)
        else:
            self._output = single_output(weight)

    @classmethod
    def from_parts(
        cls,
        parts: Iterable[QuantizedWeight],
        num_outputs: int,
        dtype: torch.dtype,
        backend: str | None = None,
    ) -> QuantizedPanels:
        """A weight whose outputs come in parts, in order and of one form; each part but the last consists of whole
        panels (`PANEL` outputs). One part is unpacked at a time. Without the extension there is one part, the whole.

        *raises:* ArgumentError: as the class, or if the parts do not make such a weight.
        """
        result: QuantizedPanels | None = None
        native: Any = None
        form, stop = None, 0
        for weight in parts:
            part = cls(weight, dtype, backend=backend)
            start, stop = stop, stop + weight.num_outputs
            if (start, stop) == (0, num_outputs):
                return part
            if result is None:
                result, form = part, form_of(weight)
                native = None if part.native is None else part.native.of_panels(num_outputs)
            is_whole = stop % PANEL == 0 or stop == num_outputs
            if native is None or form_of(weight) != form or stop > num_outputs or not is_whole:
                break
            native.put_panels(start, part.native)
        if result is None or native is None or stop != num_outputs:
            raise ArgumentError(
                f"expected parts of one form that make {num_outputs} outputs, got other parts"
            )
        result.native, result.num_outputs = native, num_outputs
        return result

    @classmethod
    def from_packed(
        cls, packed: Any, metadata: Any, num_outputs: int, num_inputs: int, dtype: torch.dtype
    ) -> QuantizedPanels:
        """A weight packed before, for activations of any dtype, read in place.

        packed: its panels, uint8, at a multiple of 64; it refers to them. metadata: the property of the packed weight.
        """
        self = cls(from_metadata(metadata, num_inputs), dtype, backend="native")
        self.num_outputs = num_outputs
        self.move(packed)
        return self

    def move(self, packed: Any) -> None:
        """Read these panels, with the same bytes, from now on. Call it before `native` is used."""
        self.native = self.native.of_panels(self.num_outputs, packed)
        self.is_saved = True

    def free(self) -> None:
        """Give the memory of a device back; the weight is not used again."""
        self._packed = self._weight = None

    @property
    def metadata(self) -> Any:
        """JSON: needed with panels and shape to read them again."""
        assert self._output is not None
        return to_metadata(self._output)

    @property
    def num_bytes(self) -> int:
        if self._packed is not None:
            return self._packed.num_bytes
        if self._weight is None:
            return self.native.num_bytes + (0 if self._order is None else self._order.nbytes)
        tensors = [self._weight.codes, self._weight.zeros, self._weight.table, self._order]
        for factor in (self._weight.scales, self._weight.minimums):
            tensors += [] if factor is None else [factor.fine, factor.coarse]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    @property
    def is_ordered(self) -> bool:
        """Whether inputs are taken in their own order, not in one of the weight's."""
        return self._order is None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., num_inputs] of `dtype`, bias [num_outputs] or None -> [..., num_outputs]."""
        if self._packed is not None:
            return self._packed.multiply(x, bias)
        if self._weight is not None:
            return multiply(x, self._weight, bias)
        x = x.contiguous() if self._order is None else x[..., self._order]
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        self.native.multiply(x, bias, out)
        return out

    def unpack(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[num_outputs, num_inputs], dequantized in float32 and rounded once to `dtype`, or to the weight's."""
        if self._packed is not None:
            return self._packed.unpack(dtype)
        return self.gather_rows(torch.arange(self.num_outputs), dtype)

    def gather_rows(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows of `unpack` for integer ids [...]: [..., num_inputs].

        *raises:* IndexError: an id is out of range; on another device torch's error.
        """
        if self._packed is not None:
            return self._packed.gather_rows(ids, dtype)
        dtype = dtype or self.dtype
        ids = ids.to(torch.int64).contiguous()
        if self._weight is not None:
            flat = ids.reshape(-1).to(self.device)
            if flat.is_cpu and flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= self.num_outputs):
                low, high = int(flat.min()), int(flat.max())
                raise IndexError(f"expected ids in [0, {self.num_outputs}), got {low} to {high}")
            rows = self._weight.select_outputs(flat).dequantize().to(dtype)
            return rows.reshape(*ids.shape, self.num_inputs)
        wide = torch.float32 if dtype is torch.float64 else dtype
        out = torch.empty((*ids.shape, self.num_inputs), dtype=wide)
        self.native.gather_rows_in(ids, out)
        if self._order is not None:
            out = out[..., self._order.argsort()]
        return out.to(dtype)


def _narrow(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers in the types of `form_of`."""
    zeros, minimums = weight.zeros, weight.minimums
    return replace(
        weight,
        scales=_narrow_factor(weight.scales),
        minimums=None if minimums is None else _narrow_factor(minimums),
        zeros=zeros.to(zeros_dtype(zeros)) if isinstance(zeros, torch.Tensor) else zeros,
    )


def _narrow_factor(factor: Factor) -> Factor:
    return Factor(
        _narrow_values(factor.fine), None if factor.coarse is None else _narrow_values(factor.coarse)
    )


def _pack_on(pack: PacksCodes, weight: QuantizedWeight, dtype: torch.dtype) -> PackedCodes:
    """A device's form of the weight."""
    return pack(
        weight.codes,
        weight.bits,
        weight.group,
        _numbers(weight.scales),
        dtype,
        zeros=weight.zeros,
        minimums=None if weight.minimums is None else _numbers(weight.minimums),
        table=weight.table,
        order=weight.order,
        label=weight.label,
    )


def _numbers(factor: Factor) -> torch.Tensor:
    """[N, groups], in two bytes where the factor is one number of two bytes for each group."""
    return factor.values() if factor.coarse is not None else _narrow_values(factor.fine)


def _pack(native: Any, weight: QuantizedWeight, dtype: str, isa: str | None) -> Any:
    """The extension's form of the weight."""
    zeros = weight.zeros
    group_zeros = None
    if isinstance(zeros, torch.Tensor):
        group_zeros = zeros.to(zeros_dtype(zeros)).contiguous()
    return native.PackedWeight.of_codes(
        weight.codes.contiguous(),
        weight.bits,
        weight.group,
        _factor(weight.scales),
        None if weight.minimums is None else _factor(weight.minimums),
        group_zeros,
        float(zeros) if isinstance(zeros, int | float) else 0.0,
        None if weight.table is None else weight.table.float().contiguous(),
        dtype,
        isa,
    )


def _factor(factor: Factor) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    fine = _narrow_values(factor.fine)
    coarse = None if factor.coarse is None else _narrow_values(factor.coarse)
    return fine.view(torch.uint8) if fine.dtype is torch.int8 else fine, coarse, fine.dtype is torch.int8


def _narrow_values(values: torch.Tensor) -> torch.Tensor:
    return values.to(packed_dtype(values)).contiguous()
