"""The launches of attention kernels that are compiled ahead of time: `KernelVariant`s by head, dtype, format, options.

A kernel's constants come from `attention_tiles`, as at a launch. Not every combination is listed: each dtype has each
head and kind of launch; formats, options, groups and block sizes are varied one at a time.

Cost: some hundred small objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.attention.codecs import rotation_size
from quire.devices.cuda.attention_tiles import (
    NVIDIA_OPTIONS,
    SPLIT,
    attend_constants,
    launch_options,
    power_of_two,
    rows_of,
    tiles_of,
)
from quire.devices.cuda.kernel_variants import TARGETS, KernelVariant

__all__ = ["attend_variants", "code_variants", "merge_variants", "row_variants"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512))
_LATENT = (576, 512)
_FORMATS = {"int8": (8, 8), "int4": (4, 4), "k8v4": (8, 4)}
_OPTIONS = (("span",), ("softcap",), ("sinks",), ("slopes",), ("span", "softcap"), ("span", "sinks"))
_ELEMENTS = {8: "*i8", 4: "*u8"}
_CONSTANT = "constexpr"


def attend_variants(kernel: Any, code_kernel: Any) -> Iterator[KernelVariant]:
    """Of `attend`; code_kernel: the same function for codes, whose rows are not multiples of 16."""
    for dtype in _DTYPES:
        for heads in _HEADS if dtype != "fp16" else ((64, 64), (128, 128)):  # float16 is bfloat16's twin
            for kind in ("partial", "single", "rows"):
                yield from _attend(kernel, kind, dtype, heads, group=16 if heads == _LATENT else 4)
    bf16, usual = "bf16", (128, 128)
    yield from _attend(kernel, "chunks", bf16, usual)
    for kind in ("partial", "rows"):
        for options in _OPTIONS:
            yield from _attend(kernel, kind, bf16, usual, options=options)
        yield from _attend(kernel, kind, bf16, (64, 64), group=8, options=("sinks", "span"))
        for group in (1, 2, 5, 7, 8, 16):
            yield from _attend(kernel, kind, bf16, usual, group=group)
        yield from _attend(kernel, kind, bf16, _LATENT, group=128)
        for block_size in (1, 32, 64, 256, 512):
            yield from _attend(kernel, kind, bf16, usual, block_size=block_size)
        for kv_format in _FORMATS:
            for heads in ((64, 64), usual, (256, 256)):
                yield from _attend(code_kernel, kind, bf16, heads, kv_format=kv_format)
        yield from _attend(code_kernel, kind, "fp32", usual, kv_format="int4")


def _attend(
    kernel: Any,
    kind: str,
    dtype: str,
    heads: tuple[int, int],
    *,
    group: int = 4,
    block_size: int = 16,
    kv_format: str = "",
    options: tuple[str, ...] = (),
) -> Iterator[KernelVariant]:
    """One variant for each size of tiles that some targets have."""
    k_width, v_width = heads
    k_bits, v_bits = _FORMATS.get(kv_format, (0, 0))
    name = "_".join(
        ("attend", kind, dtype, f"d{k_width}v{v_width}", f"g{group}", f"p{block_size}")
        + ((kv_format,) if kv_format else ())
        + options
    )
    is_partial, element = kind == "partial", f"*{dtype}"
    pointers: dict[str, str | None] = {
        "query": element,
        "k": _ELEMENTS.get(k_bits, element),
        "v": _ELEMENTS.get(v_bits, element),
        "k_scale": "*i16" if k_bits else None,
        "v_scale": "*i16" if v_bits else None,
        "out": element,
        "partial_sums": "*fp32" if is_partial else None,
        "partial_stats": "*fp32" if is_partial else None,
        "sinks": "*fp32" if "sinks" in options and not is_partial else None,
        "slopes": "*fp32" if "slopes" in options else None,
        "query_start": "*i32",
        "context_lengths": "*i32",
        "tables": "*i32",
    }
    signature = {argument: kind_of for argument, kind_of in pointers.items() if kind_of is not None}
    absent = {argument: None for argument, kind_of in pointers.items() if kind_of is None}
    divisible = [
        argument
        for argument in signature
        if argument not in ("k", "v", "k_scale", "v_scale") or not kv_format
    ]
    strides = ("query_token", "query_head", "out_token", "out_head")
    kv_strides = tuple(f"{field}_{unit}" for field in ("k", "v") for unit in ("block", "head", "token"))
    scale_strides = tuple(
        f"{field}_scale_{unit}" for field in ("k", "v") for unit in ("block", "head", "token")
    )
    divisible += [*strides, *(() if kv_format else kv_strides)]
    counts = ("num_sequences", "table_width", "window", "chunk")
    signature |= dict.fromkeys((*strides, *kv_strides, *scale_strides, *counts), "i32")
    signature |= {"scale": "fp32", "softcap": "fp32"}

    by_launch: dict[tuple[int, ...], list[str]] = {}
    for target in TARGETS:
        tiles = tiles_of(target, _DTYPES[dtype], k_width, v_width, bool(kv_format))
        rows, warps = rows_of(kind, tiles), launch_options(kind, tiles)
        by_launch.setdefault((rows, tiles.tokens, *warps.values()), []).append(target)
    for (rows, tokens, num_warps, num_stages), targets in by_launch.items():
        constants = attend_constants(
            kind,
            tiles_of(targets[0], _DTYPES[dtype], k_width, v_width, bool(kv_format)),
            group=group,
            k_width=k_width,
            v_width=v_width,
            block_size=block_size,
            k_bits=k_bits,
            v_bits=v_bits,
            is_latent=heads == _LATENT,
            has_span="span" in options,
            has_softcap="softcap" in options,
        )
        promises = [] if kv_format else ["vector_load"]
        promises += ["async_copy"] if num_stages > 1 and not kv_format else []
        if dtype != "fp32":
            promises += ["tensor_core", *(["wgmma"] if rows >= 64 else [])]
        yield KernelVariant(
            kernel,
            f"{name}_r{rows}t{tokens}w{num_warps}",
            signature,
            absent | constants,
            tuple(divisible),
            num_warps=num_warps,
            num_stages=num_stages,
            targets=tuple(targets),
            promises=tuple(promises),
            tags={
                "kind": kind,
                "head": heads,
                "group": group,
                "block_size": block_size,
                "format": kv_format,
                "options": options,
            },
            options=NVIDIA_OPTIONS,
        )


def merge_variants(kernel: Any) -> Iterator[KernelVariant]:
    """Of `merge_partials`."""
    for dtype in _DTYPES:
        for _, v_width in ((64, 64), (128, 128), (256, 256), _LATENT):
            for options in ((), ("sinks",), ("span",)) if (dtype, v_width) == ("bf16", 128) else ((),):
                has_sinks = "sinks" in options
                signature = {"partial_sums": "*fp32", "partial_stats": "*fp32", "out": f"*{dtype}"}
                signature |= {"query_start": "*i32", "context_lengths": "*i32"}
                signature |= {"sinks": "*fp32"} if has_sinks else {}
                pointers = tuple(signature)
                signature |= dict.fromkeys(("num_splits", "out_token", "out_head", "window", "chunk"), "i32")
                constants = {
                    "V_WIDTH": v_width,
                    "V_COLUMNS": power_of_two(v_width),
                    "SPLIT": SPLIT,
                    "HAS_SPAN": "span" in options,
                }
                yield KernelVariant(
                    kernel,
                    "_".join(("merge_partials", dtype, f"v{v_width}", *options)),
                    signature,
                    constants | ({} if has_sinks else {"sinks": None}),
                    (*pointers, "out_token", "out_head"),
                    num_warps=1,
                    tags={"head": v_width, "options": options},
                    options=NVIDIA_OPTIONS,
                )


def row_variants(kernel: Any) -> Iterator[KernelVariant]:
    """Of `write_rows`."""
    for dtype in _DTYPES:
        for k_width, v_width in _HEADS:
            is_latent = (k_width, v_width) == _LATENT
            num_heads = 1 if is_latent else 8
            strides = ("k_new_token", "k_new_head", "v_new_token", "v_new_head")
            strides += tuple(f"{field}_{unit}" for field in ("k", "v") for unit in ("block", "head", "token"))
            pointers = dict.fromkeys(("k_new", "v_new", "k", "v"), f"*{dtype}") | {"slots": "*i64"}
            yield KernelVariant(
                kernel,
                f"write_rows_{dtype}_d{k_width}v{v_width}_h{num_heads}",
                pointers | dict.fromkeys(strides, "i32"),
                {
                    "K_WIDTH": k_width,
                    "V_WIDTH": 0 if is_latent else v_width,
                    "K_COLUMNS": power_of_two(k_width),
                    "V_COLUMNS": power_of_two(v_width),
                    "NUM_HEADS": num_heads,
                    "HEADS": num_heads,
                    "BLOCK_SIZE": 16,
                },
                (*pointers, *strides),
                tags={"head": (k_width, v_width)},
                options=NVIDIA_OPTIONS,
            )


def code_variants(write_codes: Any, rotate_queries: Any) -> Iterator[KernelVariant]:
    """Of `write_codes` and `rotate_queries`."""
    units = ("block", "head", "token")
    for dtype in _DTYPES:
        for width in (64, 80, 128, 256):
            rotation = rotation_size(width)
            rotations = {"ROTATION": rotation, "LOG_ROTATION": rotation.bit_length() - 1}
            yield KernelVariant(
                rotate_queries,
                f"rotate_queries_{dtype}_d{width}",
                {"query": f"*{dtype}", "rotated": f"*{dtype}", "query_token": "i32", "query_head": "i32"},
                {"WIDTH": width, "COLUMNS": power_of_two(width), **rotations},
                ("query", "rotated", "query_token", "query_head"),
                num_warps=1,
                tags={"head": width},
                options=NVIDIA_OPTIONS,
            )
            if dtype != "bf16" and width != 128:
                continue
            for kv_format, (k_bits, v_bits) in _FORMATS.items():
                for has_offset in (False, True) if width == 128 else (False,):
                    strides = ("k_new_token", "k_new_head", "v_new_token", "v_new_head")
                    strides += tuple(f"{field}_{unit}" for field in ("k", "v") for unit in units)
                    strides += tuple(f"{field}_scale_{unit}" for field in ("k", "v") for unit in units)
                    signature = {"k_new": f"*{dtype}", "v_new": f"*{dtype}", "slots": "*i64"}
                    signature |= {"k_offset": "*fp32"} if has_offset else {}
                    divisible = (*signature, *strides[:4])
                    signature |= {"k": _ELEMENTS[k_bits], "v": _ELEMENTS[v_bits]}
                    signature |= {"k_scale": "*i16", "v_scale": "*i16"} | dict.fromkeys(strides, "i32")
                    yield KernelVariant(
                        write_codes,
                        f"write_codes_{dtype}_d{width}_{kv_format}" + ("_offset" if has_offset else ""),
                        signature,
                        {
                            "K_WIDTH": width,
                            "V_WIDTH": width,
                            "K_COLUMNS": max(32, power_of_two(width)),
                            "V_COLUMNS": max(32, power_of_two(width)),
                            "K_BITS": k_bits,
                            "V_BITS": v_bits,
                            **rotations,
                            "BLOCK_SIZE": 16,
                            **({} if has_offset else {"k_offset": None}),
                        },
                        divisible,
                        num_warps=1,
                        tags={"head": width, "format": kv_format, "offset": has_offset},
                        options=NVIDIA_OPTIONS,
                    )
