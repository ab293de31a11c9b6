"""A quantized weight on a device of torch, laid out for a product that reads its codes step by step.

codes     uint8 [steps, step, width]: `step` inputs (32, or 16 in groups of 16) by `width` outputs. Codes of at most 4
          bits lie two in a byte: the low half has one step of inputs, the high half the next.
factors   [groups, width]: scales, minimums and zeros; of 2 bytes (zeros: 1) if the weight has them so.

`width` is the number of outputs, rounded up to 32; `CodeForm.device_bytes` repeats these sizes for a plan. The product
here is torch's own with the dequantized weight, whose bits may depend on the number of rows; `code_kernels` reads the
codes.

Cost: the layout is made on the device, from a byte for each code. `multiply` dequantizes the weight.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from quire.errors import ArgumentError

__all__ = ["OUTPUT_UNIT", "LaidOutCodes"]

OUTPUT_UNIT = 32  # outputs are stored in a multiple of it
_HALVES = (torch.float16, torch.bfloat16)
_VALUES_AT_ONCE = 1 << 24  # that are dequantized in float32


class LaidOutCodes:
    """A weight [num_outputs, num_inputs] as codes on `device`, multiplied in `dtype`; a `PackedCodes`.

    codes: uint8 [N, K], each below 2**bits. group: inputs that share a scale: 16, a multiple of 32, or all. scales,
    minimums: [N, K / group]; zeros: as these, or one for all; table: [2**bits], the value of each code. order: [K], the
    input of each column of codes. They are read once, on any device.

    *raises:* ArgumentError: another group.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        bits: int,
        group: int,
        scales: torch.Tensor,
        dtype: torch.dtype,
        *,
        device: torch.device,
        zeros: torch.Tensor | float | None = None,
        minimums: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        label: str = "codes",
    ) -> None:
        self.num_outputs, self.num_inputs = codes.shape
        self.dtype = dtype
        if group not in (16, self.num_inputs) and group % 32:
            raise ArgumentError(
                f"{label}: expected a scale for each 16 inputs, a multiple of 32, or all {self.num_inputs}, got {group}"
            )
        self._step = 16 if group == 16 else 32
        self._group_steps = 0 if group == self.num_inputs else group // self._step
        self._is_packed = bits <= 4
        self._zero = 0.0  # of all codes; or `_zeros`
        if isinstance(zeros, int | float):
            self._zero, zeros = float(zeros), None
        elif zeros is not None and not torch.equal(zeros.float(), zeros.float().round()):
            # scale x (code - zero), the zero not an integer
            minimums, zeros = scales.float() * zeros.float(), None
        self._codes = _in_steps(codes.to(device), self._step, self._is_packed)
        self._scales = _by_outputs(scales, device)
        self._zeros = None if zeros is None else _by_outputs(zeros, device)
        self._minimums = None if minimums is None else _by_outputs(minimums, device)
        self._table = None if table is None else table.float().to(device)
        self._order = None if order is None else order.to(device)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, without the table."""
        parts = (self._codes, self._scales, self._zeros, self._minimums, self._order)
        return sum(part.nbytes for part in parts if part is not None)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., num_inputs] of `dtype`, bias [num_outputs] or None -> [..., num_outputs]."""
        return F.linear(x, self.unpack(), bias)

    def unpack(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[num_outputs, num_inputs], each value computed in float32 and rounded once to `dtype`, or to the weight's."""
        out = self._codes.new_empty((self.num_outputs, self.num_inputs), dtype=dtype or self.dtype)
        count = max(1, _VALUES_AT_ONCE // self.num_inputs)
        for start in range(0, self.num_outputs, count):
            part = slice(start, min(start + count, self.num_outputs))
            out[part] = self._rows(part)
        return out

    def gather_rows(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Integer ids [...] -> rows [..., num_inputs] of `unpack`; an id out of range is torch's error."""
        rows = self._rows(ids.reshape(-1).to(self._codes.device, torch.int64))
        return rows.to(dtype or self.dtype).view(*ids.shape, self.num_inputs)

    def _rows(self, outputs: torch.Tensor | slice) -> torch.Tensor:
        """float32 [n, num_inputs]."""
        codes = self._codes[..., outputs]
        if self._is_packed:
            codes = torch.stack((codes & 15, codes >> 4), 1)
        codes = codes.reshape(-1, codes.shape[-1])[: self.num_inputs]
        values = codes.float() if self._table is None else self._table[codes.int()]
        by_group = values.view(self._scales.shape[0], -1, values.shape[-1])
        if self._zeros is not None:
            by_group = by_group - self._zeros[:, None, outputs].float()
        elif self._zero:
            by_group = by_group - self._zero
        by_group = by_group * self._scales[:, None, outputs].float()
        if self._minimums is not None:
            by_group = by_group - self._minimums[:, None, outputs].float()
        rows = by_group.view(values.shape).t()
        return rows if self._order is None else rows[:, self._order.argsort()]


def _in_steps(codes: torch.Tensor, step: int, is_packed: bool) -> torch.Tensor:
    """[N, K] -> [steps, step, width], or [steps / 2, step, width] with an odd step in the high halves."""
    num_outputs, num_inputs = codes.shape
    depth = step * (2 if is_packed else 1)
    padded = codes.new_zeros((-(-num_inputs // depth) * depth, _width(num_outputs)))
    padded[:num_inputs, :num_outputs] = codes.t()
    steps = padded.view(-1, step, padded.shape[1])
    return steps[0::2] | steps[1::2] << 4 if is_packed else steps


def _by_outputs(factors: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[N, groups] -> [groups, width], in float32 unless they are uint8 or of 16 bits."""
    num_outputs, num_groups = factors.shape
    dtype = factors.dtype if factors.dtype in (*_HALVES, torch.uint8) else torch.float32
    padded = torch.zeros((num_groups, _width(num_outputs)), dtype=dtype, device=device)
    padded[:, :num_outputs] = factors.to(device, dtype).t()
    return padded


def _width(num_outputs: int) -> int:
    return -(-num_outputs // OUTPUT_UNIT) * OUTPUT_UNIT
