"""Writes quantized weights as their tools do, and decodes them as those tools do, in numpy only.

Each function takes [N, K] codes with their scales and zeros and gives the tensors of one module, by their last names;
`values` are the decoded numbers in float32, as the format's specification defines them. It uses no code of Quire.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Rounded:
    """A weight of integer codes: (codes - zeros) * scales, by groups of inputs."""

    codes: np.ndarray  # [N, K], 0 to 2**bits - 1
    zeros: np.ndarray  # [N, groups]
    scales: np.ndarray  # [N, groups] float32
    group_of: np.ndarray  # [K]
    bits: int

    @property
    def values(self) -> np.ndarray:
        zeros = self.zeros[:, self.group_of].astype(np.float32)
        return (self.codes.astype(np.float32) - zeros) * self.scales[:, self.group_of]


def round_weight(
    weight: np.ndarray,
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    half: bool = False,
    shuffled: np.random.Generator | None = None,
) -> Rounded:
    """Round to nearest, in groups of neighbours, or of inputs in a random order. half: scales that float16 holds."""
    outputs, inputs = weight.shape
    group_of = np.arange(inputs) // group
    if shuffled is not None:
        group_of = shuffled.permutation(group_of)
    num_groups, most = -(-inputs // group), (1 << bits) - 1
    low, high = (np.zeros((outputs, num_groups), dtype=np.float32) for _ in range(2))
    for index in range(num_groups):
        part = weight[:, group_of == index]
        low[:, index], high[:, index] = part.min(1), part.max(1)
    if symmetric:
        scales = np.maximum(-low, high) / (most // 2)
        zeros = np.full(scales.shape, (most + 1) // 2)
    else:
        scales = (np.maximum(high, 0) - np.minimum(low, 0)) / most
        zeros = np.clip(np.round(-low / scales), 1, most).astype(np.int64)
    scales = scales.astype(np.float16 if half else np.float32).astype(np.float32)
    codes = np.clip(np.round(weight / scales[:, group_of]) + zeros[:, group_of], 0, most).astype(np.int64)
    return Rounded(codes, zeros, scales, group_of, bits)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] -> [rows, ceil(n * bits / 32)] int32: value i in the bits from i * bits on."""
    rows, count = codes.shape
    stream = (codes[:, :, None] >> np.arange(bits) & 1).reshape(rows, -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -(count * bits) % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def gptq(weight: Rounded, *, minus_one: bool) -> dict[str, torch.Tensor]:
    zeros = weight.zeros.T - minus_one
    return {
        "qweight": _tensor(pack(weight.codes, weight.bits).T),
        "qzeros": _tensor(pack(zeros, weight.bits)),
        "scales": _tensor(weight.scales.T).half(),
        "g_idx": _tensor(weight.group_of.astype(np.int32)),
    }


def awq(weight: Rounded) -> dict[str, torch.Tensor]:
    def packed(values: np.ndarray) -> torch.Tensor:  # [rows, N]
        ordered = values.reshape(values.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return _tensor(pack(ordered.reshape(values.shape), 4))

    return {
        "qweight": packed(weight.codes.T),
        "qzeros": packed(weight.zeros.T),
        "scales": _tensor(weight.scales.T).half(),
    }


def compressed_packed(weight: Rounded, *, symmetric: bool) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": _tensor(pack(weight.codes, weight.bits)),
        "weight_scale": _tensor(weight.scales),
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _tensor(pack(weight.zeros.T, weight.bits).T)
    return tensors


def compressed_int8(weight: Rounded) -> dict[str, torch.Tensor]:
    return {"weight": _tensor(weight.codes - 128).to(torch.int8), "weight_scale": _tensor(weight.scales)}


def fp8_blocks(weight: np.ndarray, block: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Tensors and values of 8-bit floats with a scale for each `block` x `block` values."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // block), -(-inputs // block)
    scales = np.zeros((rows, columns), dtype=np.float32)
    spread = np.zeros_like(weight)
    for row in range(rows):
        for column in range(columns):
            part = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
            scales[row, column] = np.abs(weight[part]).max() / 448
            spread[part] = scales[row, column]
    codes = _tensor(weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": _tensor(scales)}, codes.float().numpy() * spread


def fp8_channels(weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    scales = np.abs(weight).max(1, keepdims=True).astype(np.float32) / 448
    codes = _tensor(weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": _tensor(scales)}, codes.float().numpy() * scales


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
# The 16 quantiles of a normal distribution that QLoRA's paper gives.
NF4 = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], dtype=np.float32,
)  # fmt: skip


def mxfp4(weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Of [E, N, K]: `_blocks` and `_scales`, and the values."""
    grouped = weight.reshape(*weight.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(grouped).max(-1))).astype(np.int64) - 2
    powers = np.exp2(exponents)[..., None].astype(np.float32)
    codes = np.abs((grouped / powers)[..., None] - E2M1).argmin(-1)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    tensors = {
        "_blocks": _tensor(packed).to(torch.uint8),
        "_scales": _tensor(exponents + 127).to(torch.uint8),
    }
    return tensors, (E2M1[codes] * powers).reshape(weight.shape)


def nf4(weight: np.ndarray, *, nested: bool, block: int = 64) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """bitsandbytes' tensors of a weight, "weight.absmax" and so on, and the values."""
    blocks = weight.reshape(-1, block)
    scales = np.abs(blocks).max(1).astype(np.float32)
    state: dict[str, object] = {
        "quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape),
    }  # fmt: skip
    tensors = {"weight.absmax": _tensor(scales), "weight.quant_map": _tensor(NF4)}
    if nested:
        offset = float(scales.mean())
        runs = -(-scales.size // 256)
        centred = np.pad(scales - offset, (0, runs * 256 - scales.size)).reshape(runs, 256)
        largest = np.abs(centred).max(1).astype(np.float32)
        of_code = np.linspace(-1, 1, 256, dtype=np.float32)
        inner = np.abs((centred / largest[:, None])[..., None] - of_code).argmin(-1)
        scales = (of_code[inner] * largest[:, None]).reshape(-1)[: scales.size] + np.float32(offset)
        tensors |= {
            "weight.absmax": _tensor(inner.reshape(-1)[: scales.size]).to(torch.uint8),
            "weight.nested_absmax": _tensor(largest),
            "weight.nested_quant_map": _tensor(of_code),
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = np.abs((blocks / scales[:, None])[..., None] - NF4).argmin(-1)
    flat = codes.reshape(-1)
    tensors["weight"] = _tensor(flat[0::2] << 4 | flat[1::2]).to(torch.uint8).unsqueeze(1)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(_json(state)), dtype=torch.uint8)
    return tensors, (NF4[codes] * scales[:, None]).reshape(weight.shape)


def int8_of_bitsandbytes(weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    largest = np.abs(weight).max(1, keepdims=True).astype(np.float32)
    codes = np.round(weight / largest * 127)
    tensors = {"weight": _tensor(codes).to(torch.int8), "SCB": _tensor(largest[:, 0])}
    tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return tensors, (codes * largest / np.float32(127)).astype(np.float32)


def _json(value: object) -> bytes:
    import json

    return json.dumps(value).encode()


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
