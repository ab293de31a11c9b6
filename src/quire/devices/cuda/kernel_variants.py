"""A kernel variant: one Triton kernel with the types, constants and launch options of one launch.

Each file of kernels has a function `variants()` that lists every variant that the device may launch.
`scripts/gpu-kernels` compiles them ahead of time for each target of `TARGETS`, and compares their resources with a
checked-in table. A launch with a type, constant, divisibility, number of warps or stages that no variant has is a
kernel that was never judged.

Invariants
    K1  a variant's name is unique among all variants.
    K2  signature and constexprs together name every parameter of the kernel, in any order.
    K3  divisible names exactly the arguments that are multiples of 16 (pointers: 16-byte aligned) at each launch: the
        compiler vectorises loads by it, so that other divisibility is another kernel. An integer that varies from
        launch to launch is in the kernel's do_not_specialize list: otherwise triton compiles another kernel at run time
        when it is 1 or a multiple of 16.

Triton is not imported here; a variant only holds its kernel. Cost: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PROMISES", "TARGETS", "KernelVariant"]

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

PROMISES = ("tensor_core", "wgmma", "async_copy", "vector_load")
"""Instructions that a variant may promise, by what they are for.

tensor_core: a matrix instruction of any kind. wgmma: the matrix instruction of a group of four warps, checked on sm_90
alone. async_copy: a copy from global to shared memory without registers, checked on NVIDIA targets. vector_load: a load
of 16 bytes from global memory.
"""


@dataclass(frozen=True)
class KernelVariant:
    """See the file's head.

    kernel: a function decorated by triton.jit. name: of the variant, such as "decode_bf16_d128_g4_p16". signature:
    Triton's type of each argument that is not a constant ("*bf16", "i32", "i64", "fp32"). constexprs: the value of each
    constant parameter. divisible: the arguments that are multiples of 16. targets: the targets that launch it.
    promises: instructions that the compiled code must contain (`PROMISES`). tags: further axes of the pairwise matrix;
    "head" is paired with kernel, dtype and target, any other with the kernel alone. options: further launch options,
    such as {"enable_fp_fusion": False}.
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    targets: tuple[str, ...] = TARGETS
    promises: tuple[str, ...] = ()
    tags: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
