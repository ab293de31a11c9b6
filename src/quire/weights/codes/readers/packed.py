"""Codes of a few bits packed without gaps into words, and groups of inputs of unequal size.

Packed: value i has the bits from i * bits on, the lowest first, across the ends of words. GPTQ and compressed-tensors
use this layout for every number of bits.

Cost: as many bytes as there are values, and for 3, 5, 6 and 7 bits a few times that temporarily.
"""

from __future__ import annotations

import math

import torch

from quire.weights.codes.readers.checkpoint_weights import mismatch

__all__ = ["even_groups", "groups_by_index", "sizes_of_groups", "unpack"]


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[rows, n] int32 -> [rows, count] uint8: the first `count` values of `bits` bits in each row.

    bits: 2 to 8.
    """
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed[:, :count].contiguous()
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        fields = packed.unsqueeze(-1) >> shifts & (1 << bits) - 1
        return fields.flatten(1)[:, :count].contiguous()
    # 8 values are `bits` whole bytes.
    runs = -(-count // 8)
    packed = torch.nn.functional.pad(packed, (0, max(0, runs * bits - packed.shape[1])))[:, : runs * bits]
    packed = torch.nn.functional.pad(packed.reshape(-1, bits), (0, 1)).to(torch.int32)
    starts = torch.arange(8) * bits
    first, shifts = starts // 8, (starts % 8).to(torch.int32)
    fields = (packed[:, first] | packed[:, first + 1] << 8) >> shifts & (1 << bits) - 1
    return fields.to(torch.uint8).reshape(words.shape[0], -1)[:, :count].contiguous()


def even_groups(sizes: list[int], *group_values: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """A size that divides every group's, and each tensor of [N, groups] repeated to groups of that size.

    Formats whose groups do not divide a row have a smaller last group.
    """
    size = math.gcd(*sizes)
    if all(group_size == size for group_size in sizes):
        return size, list(group_values)
    repeats = torch.tensor(sizes) // size
    return size, [values.repeat_interleave(repeats, dim=1) for values in group_values]


def sizes_of_groups(inputs: int, size: int) -> list[int]:
    """Sizes of adjacent groups; the last is smaller if `size` does not divide the inputs."""
    return [min(size, inputs - start) for start in range(0, inputs, size)]


def groups_by_index(
    name: str, group_of: torch.Tensor, inputs: int, groups: int
) -> tuple[list[int], torch.Tensor | None]:
    """The size of each group, and the order of inputs that makes groups adjacent; None if they are already.

    group_of: the group of each input. name: of the weight, for messages.

    *raises:* LoadError: a group is out of range, or has no inputs.
    """
    is_vector = group_of.shape == (inputs,)
    if not is_vector or int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        got = int(group_of.max()) if is_vector else list(group_of.shape)
        raise mismatch(name, f"g_idx of {inputs} groups below", groups, got)
    group_of = group_of.long()
    sizes = torch.bincount(group_of, minlength=groups)
    if not bool(sizes.all()):
        raise mismatch(name, "g_idx with inputs of each of the groups", groups, int((sizes > 0).sum()))
    is_sorted = bool((group_of[1:] >= group_of[:-1]).all())
    return sizes.tolist(), None if is_sorted else torch.argsort(group_of, stable=True)
