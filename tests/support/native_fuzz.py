"""Calls every binding of `quire._native` with wrong arguments: `python native_fuzz.py SEED CALLS [NAME...]`.

A call may succeed or raise any exception; it may not end the process, and a block manager must still prove its
invariants.
The bindings are listed from the module. Half of the calls change one or two arguments of a valid call (`recipes`); the
others use random arguments. Each call is first written to the file FUZZ_LOG, so that a crash can be reported. Prints
the number of calls of each binding as JSON.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire import _native
from quire.cache.manager.block_manager import PythonBlockManager
from quire.errors import InvariantError

BLOCK, HEADS, WIDTH, HIDDEN, ROWS = 4, 2, 8, 16, 3
NO_POSITIONS = np.zeros(0, np.int64)
Recipe = Callable[[], tuple[Callable[..., Any], list[Any]]]


def bindings() -> dict[str, Any]:
    """Everything that can be called or read: functions, constructors, methods, properties."""
    found: dict[str, Any] = {}
    for name, value in vars(_native).items():
        if isinstance(value, type):
            for member, method in vars(value).items():
                if not member.startswith("_") or (
                    member == "__init__" and type(method).__name__ == "nb_method"
                ):
                    found[f"{name}.{member}"] = method
        elif callable(value) and not name.startswith("__"):
            found[name] = value
    return found


# Valid calls


def tokens(count: int = 10) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def manager() -> Any:
    """One with two groups, a prompt in the tree and two open sequences: 0, which has reserved, and 1."""
    made = _native.BlockManager([("full", 0), ("window", 8)], 64, BLOCK, True, 1, True, 2)
    for _ in range(2):
        made.open(tokens(), b"", NO_POSITIONS, [])
    made.reserve(np.array([0]), np.array([10]), 2)
    made.commit(0, 9)
    made.record_events(True)
    return made


def plan() -> Any:
    return manager().reserve(np.array([1]), np.array([1]), 1)


def view() -> Any:
    pool = torch.zeros(4, HEADS, BLOCK, 2 * WIDTH)
    return _native.PagedView(pool[..., :WIDTH], pool[..., WIDTH:])


def batch() -> Any:
    rows = [torch.tensor(values, dtype=torch.int32) for values in ([0, 2, 3], [5, 3], [[0, 1], [2, -1]])]
    return _native.AttentionBatch(*rows, 2)


def options() -> Any:
    return _native.AttentionOptions(0.5, 0, 0, 0.0, torch.zeros(HEADS), torch.zeros(HEADS))


def weight(num_outputs: int = HIDDEN, num_inputs: int = HIDDEN) -> Any:
    return _native.PackedWeight(torch.ones(num_outputs, num_inputs))


def norm(width: int = HIDDEN) -> Any:
    return _native.Norm("rms", torch.ones(width), None, 1e-5)


def around() -> Any:
    return _native.Surroundings(norm(), None, 1.0)


def attention(rotation: str = "halves") -> Any:
    qkv = [(weight(HEADS * WIDTH), torch.zeros(HEADS * WIDTH)) for _ in range(3)]
    arguments = around(), qkv, norm(WIDTH), None, True, rotation, weight(HIDDEN, HEADS * WIDTH), None, HEADS
    return _native.AttentionBlock(*arguments)


def mlp() -> Any:
    inputs = [(weight(24), None), (weight(24), torch.zeros(24))]
    return _native.MlpBlock(around(), inputs, True, "silu", weight(HIDDEN, 24), torch.zeros(HIDDEN))


def codes() -> Any:
    """A weight held as codes."""
    return _native.PackedWeight.of_codes(*code_arguments())


def code_arguments(num_outputs: int = HIDDEN) -> list[Any]:
    by_group = torch.ones(num_outputs, 1, dtype=torch.uint8)
    scales = (torch.ones(num_outputs, 1, dtype=torch.uint8), torch.ones(num_outputs, 1), True)
    values = torch.ones(num_outputs, HIDDEN, dtype=torch.uint8)
    return [values, 4, HIDDEN, scales, None, by_group, 0.0, None, "float32", None]


def mixer_arguments() -> list[Any]:
    """Of a gated delta net of 2 heads of 4: q, k and v, the gate, a and b are columns of one product."""
    heads = torch.ones(2)
    columns = [[(0, 0, 24)], [(0, 24, 8)], [(0, 32, 2)], [(0, 34, 2)]]
    return [
        "delta", around(), [(weight(36), torch.zeros(36))], columns, torch.ones(24, 4), torch.zeros(24), (2, 4, 4, 2),
        -heads, heads, None, (0.0, 1.0), 1.0, torch.ones(4), 1e-5, 4, False, weight(HIDDEN, 8), torch.zeros(HIDDEN),
    ]  # fmt: skip


def decoder_arguments() -> list[Any]:
    parts = [(attention(), mlp())], [view()], [options()], [0], weight(20), norm(), weight(20), None
    return list(parts)


def rows() -> torch.Tensor:
    return torch.ones(ROWS, HIDDEN)


def angles(count: int = ROWS) -> torch.Tensor:
    return torch.ones(count, WIDTH)


def slots() -> torch.Tensor:
    return torch.tensor([3, 4, 9])


def packed() -> np.ndarray:
    memory = np.zeros(_native.packed_num_bytes(HIDDEN, HIDDEN, "float32") + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + memory.size - 64]


_storage = np.zeros(4096, np.uint8)


def pieces() -> np.ndarray:
    return np.array([[8, _storage.ctypes.data + 64, 3, 16, 32], [0, _storage.ctypes.data, 1, 8, 8]], np.int64)


def states(*sizes: int) -> torch.Tensor:
    return torch.zeros(5, *sizes)


def recurrence() -> Any:
    """Two sequences, of two rows and of one, with a checkpoint."""
    lists = (torch.tensor(values) for values in ([0, 2, ROWS], [3, 1], [1], [4]))
    return _native.RecurrenceStep(*lists, None)


def of_manager(name: str, *arguments: Any) -> Recipe:
    return lambda: (getattr(manager(), name), [copied(one) for one in arguments])


def copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray | list) else value


_PROMPT = tokens(), b"", np.array([0, 7]), [b"a", b"b"]
_IDS, _ONES = np.array([0, 1]), np.array([1, 1])


def recipes() -> dict[str, Recipe]:
    """By the name of a binding what to call, and with what, so that it succeeds. A property has none."""
    read = [(os.open(__file__, os.O_RDONLY), 0, bytearray(8), [bytearray(400), bytearray(200)])]
    return {
        "BlockManager.__init__": lambda: (
            _native.BlockManager,
            [[("full", 0), ("window", 8), ("chunked", 4)], 16, BLOCK, True, 0, False, 1],
        ),
        "BlockManager.match": of_manager("match", *_PROMPT),
        "BlockManager.open": of_manager("open", *_PROMPT, 3, 2),
        "BlockManager.explain": of_manager("explain", *_PROMPT),
        "BlockManager.drop": of_manager("drop", *_PROMPT),
        "BlockManager.evict_path": of_manager("evict_path", *_PROMPT),
        "BlockManager.set_cache_priority": of_manager("set_cache_priority", *_PROMPT, 2, 3),
        "BlockManager.append": of_manager("append", 0, tokens()),
        "BlockManager.num_blocks_needed": of_manager("num_blocks_needed", _IDS, _ONES, 1),
        "BlockManager.reserve": of_manager("reserve", _IDS, _ONES, 1),
        "BlockManager.num_blocks_to_restore": of_manager("num_blocks_to_restore", 1, 10),
        "BlockManager.restore": of_manager("restore", 1, 10),
        "BlockManager.commit": of_manager("commit", 0, 10),
        "BlockManager.advance": of_manager("advance", _IDS[:1], np.array([10]), tokens(1)),
        "BlockManager.complete": of_manager("complete", 1),
        "BlockManager.rewind": of_manager("rewind", 0, 5),
        "BlockManager.resize": of_manager("resize", 70, 2),
        "BlockManager.block_table": of_manager("block_table", 0, 1),
        "BlockManager.set_limits": of_manager("set_limits", 4, 2, 8),
        "BlockManager.record_events": of_manager("record_events", False),
        **{
            f"BlockManager.{name}": of_manager(name, 1)
            for name in (
                "tokens", "num_tokens", "num_cached_tokens", "num_computed_tokens", "fork", "close", "withdraw",
                "is_findable", "owner_counts", "num_available_blocks", "max_owner_blocks", "content_of",
            )
        },
        **{
            f"BlockManager.{name}": of_manager(name)
            for name, call in vars(PythonBlockManager).items()
            if inspect.isfunction(call) and list(inspect.signature(call).parameters) == ["self"]
        },
        "BlockManager.reset": lambda: (_native.BlockManager([("full", 0)], 4, BLOCK, True, 0, True, 1).reset, []),
        "StepPlan.group": lambda: (plan().group, [1]),
        "PagedView.__init__": lambda: (
            _native.PagedView,
            [torch.zeros(4, HEADS, BLOCK, WIDTH), torch.zeros(4, HEADS, BLOCK, 16)],
        ),
        "AttentionBatch.__init__": lambda: (
            _native.AttentionBatch,
            [np.array([0, 2, 3], np.int32), np.array([5, 3], np.int32), np.array([[0, 1], [2, -1]], np.int32), 2, True],
        ),
        "AttentionBatch.traffic": lambda: (batch().traffic, [view(), HEADS, options()]),
        "AttentionOptions.__init__": lambda: (
            _native.AttentionOptions,
            [0.5, 8, 0, 1.0, torch.zeros(HEADS)],
        ),
        "attention_write": lambda: (
            _native.attention_write,
            [view(), torch.ones(ROWS, HEADS, WIDTH), torch.ones(ROWS, HEADS, WIDTH), slots(), 2],
        ),
        "attention_run": lambda: (
            _native.attention_run,
            [view(), torch.ones(ROWS, HEADS, WIDTH), torch.ones(ROWS, HEADS, WIDTH), batch(), options()],
        ),
        "read_bandwidth": lambda: (_native.read_bandwidth, [1 << 20, 1]),
        "PackedWeight.__init__": lambda: (_native.PackedWeight, [torch.ones(5, 7), None]),
        "PackedWeight.at": lambda: (_native.PackedWeight.at, [packed(), HIDDEN, HIDDEN, "float32", None]),
        "PackedWeight.multiply": lambda: (weight().multiply, [rows(), torch.ones(HIDDEN), rows()]),
        "PackedWeight.unpack": lambda: (weight().unpack, [torch.ones(HIDDEN, HIDDEN)]),
        "PackedWeight.gather_rows": lambda: (weight().gather_rows, [slots(), rows()]),
        "PackedWeight.of_codes": lambda: (_native.PackedWeight.of_codes, code_arguments()),
        "PackedWeight.of_panels": lambda: (codes().of_panels, [2 * HIDDEN, None]),
        "PackedWeight.put_panels": lambda: (codes().of_panels(HIDDEN).put_panels, [0, codes()]),
        "multiply_each": lambda: (_native.multiply_each, [[weight()], rows().unsqueeze(1), rows().unsqueeze(1)]),
        "PackedWeight.goes_with": lambda: (weight().goes_with, [weight()]),
        "PackedWeight.gather_rows_in": lambda: (codes().gather_rows_in, [slots(), rows()]),
        "panel_layout": lambda: (_native.panel_layout, ["bfloat16", None]),
        "packed_num_bytes": lambda: (_native.packed_num_bytes, [5, 7, "float16", None]),
        "Norm.__init__": lambda: (_native.Norm, ["layer", torch.ones(4), torch.ones(4), 1e-5]),
        "Norm.run": lambda: (norm().run, [rows(), rows()]),
        "Surroundings.__init__": lambda: (_native.Surroundings, [norm(), norm(), 0.5]),
        "AttentionBlock.__init__": lambda: (
            _native.AttentionBlock,
            [around(), [(weight(48), torch.zeros(48))], norm(WIDTH), None, True, "pairs", weight(), None, HEADS],
        ),
        "AttentionBlock.run": lambda: (
            attention().run,
            [view(), batch(), options(), slots(), angles(), angles(), rows(), rows()],
        ),
        "MlpBlock.__init__": lambda: (
            _native.MlpBlock,
            [around(), [(weight(24), None), (weight(24), torch.zeros(24))], True, "gelu", weight(HIDDEN, 24), None],
        ),
        "MlpBlock.run": lambda: (mlp().run, [rows(), rows()]),
        "MixerBlock.__init__": lambda: (_native.MixerBlock, mixer_arguments()),
        "MixerBlock.run": lambda: (
            _native.MixerBlock(*mixer_arguments()).run,
            [recurrence(), states(3, 24), states(2, 4, 4), rows(), rows()],
        ),
        "Decoder.__init__": lambda: (_native.Decoder, decoder_arguments()),
        "Decoder.run": lambda: (
            _native.Decoder(*decoder_arguments()).run,
            [
                [batch()], [slots()], torch.tensor([1, 2, 19]), None, torch.tensor([0, 1, 4]), angles(5), angles(5),
                torch.tensor([2]), torch.zeros(1, 20),
            ],
        ),
        "RecurrenceStep.__init__": lambda: (
            _native.RecurrenceStep,
            [np.array([0, 2, 3]), np.array([3, 1]), np.array([0, 2]), np.array([0, 2]), None],
        ),
        "recurrent_scan": lambda: (
            _native.recurrent_scan,
            [
                recurrence(), states(4, WIDTH, 6), torch.ones(ROWS, 4, WIDTH), torch.ones(ROWS, 4), -torch.ones(4),
                torch.ones(ROWS, 2, 6), torch.ones(ROWS, 2, 6), torch.ones(4), torch.ones(ROWS, 4, WIDTH),
            ],
        ),
        "recurrent_delta": lambda: (
            _native.recurrent_delta,
            [
                recurrence(), states(4, 6, WIDTH), torch.ones(ROWS, 2, 6), torch.ones(ROWS, 2, 6),
                torch.ones(ROWS, 4, WIDTH), -torch.ones(ROWS, 4, 6), torch.ones(ROWS, 4), 0.5, True,
                torch.ones(ROWS, 4, WIDTH),
            ],
        ),
        "recurrent_lru": lambda: (
            _native.recurrent_lru,
            [
                recurrence(), states(WIDTH), torch.ones(ROWS, WIDTH), -torch.ones(ROWS, WIDTH),
                torch.zeros(ROWS, dtype=torch.uint8), torch.ones(ROWS, WIDTH),
            ],
        ),
        "short_convolution": lambda: (
            _native.short_convolution,
            [
                recurrence(), states(3, WIDTH), torch.ones(ROWS, WIDTH), torch.ones(WIDTH, 4), torch.ones(WIDTH), True,
                torch.ones(ROWS, WIDTH),
            ],
        ),
        "argmax_rows": lambda: (
            _native.argmax_rows,
            [torch.ones(5, 9), torch.zeros(5, dtype=torch.int64), torch.zeros(5), None],
        ),
        "copy_rows": lambda: (_native.copy_rows, [np.zeros(64, np.uint8), pieces(), True]),
        "read_now": lambda: (_native.read_now, [list(read)]),
        "set_num_threads": lambda: (_native.set_num_threads, [2]),
        **{
            name: lambda name=name: (getattr(_native, name), [])
            for name in ("isa", "supported_isas", "num_threads", "start_recording", "take_records")
        },
    }  # fmt: skip


# Wrong arguments


def freed() -> torch.Tensor:
    """A tensor whose memory is gone."""
    tensor = torch.ones(8, 16)
    tensor.untyped_storage().resize_(0)
    return tensor


def anything(rng: random.Random) -> Any:
    """A value that hardly any argument takes."""
    kinds: list[Callable[[], Any]] = [
        lambda: None, lambda: -1, lambda: 0, lambda: 1, lambda: 2**31, lambda: 2**62, lambda: 2**63 - 1, lambda: 2**63,
        lambda: -(2**63), lambda: 2**64, lambda: 1.5, lambda: float("nan"), lambda: "", lambda: "float32",
        lambda: b"", lambda: [], lambda: [None], lambda: (), object, lambda: np.zeros(0, np.int32),
        lambda: np.zeros(3, np.float64), lambda: np.arange(8)[::2], lambda: np.zeros((2, 2), np.int64),
        lambda: np.zeros(3, ">i8"), lambda: torch.zeros(2), lambda: torch.zeros(2, 3).t(),
        lambda: torch.zeros(1).expand(2**40), lambda: torch.zeros(1).expand(2**20, 2**20, 2**18, 8),
        lambda: torch.zeros(1, 1, 1, 1, 1), lambda: torch.empty(0), lambda: torch.zeros(0, 2**40), freed,
        lambda: torch.empty(3, 16, device="meta"), lambda: torch.zeros(3, dtype=torch.bool),
        lambda: torch.ones(3, 16, requires_grad=True), lambda: torch.eye(3).to_sparse(), lambda: bytearray(7),
        lambda: memoryview(bytes(64))[::3], lambda: _native.PackedWeight.__new__(_native.PackedWeight),
        lambda: _native.PagedView.__new__(_native.PagedView), view, batch, options, weight, norm, around, manager, plan,
        recurrence, lambda: _native.RecurrenceStep.__new__(_native.RecurrenceStep),
    ]  # fmt: skip
    return rng.choice(kinds)()


def spoiled(value: Any, rng: random.Random) -> Any:
    """Nearly `value`."""
    if rng.random() < 0.3:
        return anything(rng)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([-value - 1, 0, value + 1, value - 1, value * 3, value + 2**31, value + 2**62])
    if isinstance(value, float):
        return rng.choice([0.0, -value, float("inf"), float("nan"), 1e300])
    if isinstance(value, str | bytes):
        return value + value
    if isinstance(value, list):
        return spoiled_list(value, rng)
    if isinstance(value, tuple):
        return tuple(spoiled_list(list(value), rng))
    if isinstance(value, np.ndarray):
        return spoiled_array(np.atleast_1d(value), rng)
    if isinstance(value, torch.Tensor):
        return spoiled_tensor(value, rng)
    if isinstance(value, bytearray):
        return value[: rng.randrange(len(value) + 1)]
    return anything(rng)


def spoiled_list(values: list[Any], rng: random.Random) -> list[Any]:
    values = list(values)
    at = rng.randrange(len(values)) if values else 0
    how = rng.randrange(4)
    if how == 0 or not values:
        return [*values, anything(rng)]
    if how == 1:
        return values[:at] + values[at + 1 :]
    values[at] = spoiled(values[at], rng) if how == 2 else None
    return values


def spoiled_array(array: np.ndarray, rng: random.Random) -> Any:
    how = rng.randrange(7)
    if how == 0:
        return array[: rng.randrange(len(array) + 1)]
    if how == 1:
        return np.concatenate([array, array])
    if how == 2:
        return array.astype(rng.choice([np.int8, np.int32, np.int64, np.float32, np.float64]))
    if how == 3:
        return np.repeat(array, 2, axis=0)[::2]
    if how == 4:
        return array.reshape(1, *array.shape)
    changed = array.copy()
    if how == 5:
        changed.flags.writeable = False
    elif changed.size:
        most = int(np.iinfo(array.dtype).max) if array.dtype.kind in "iu" else 1e30
        at = rng.randrange(changed.size)
        changed.flat[at] = rng.choice([most, most // 2, 0, 5]) * (
            1 if array.dtype.kind == "u" else rng.choice([1, -1])
        )
    return changed


def spoiled_tensor(tensor: torch.Tensor, rng: random.Random) -> Any:
    how = rng.randrange(9)
    if how == 0:
        return tensor[: rng.randrange(len(tensor) + 1)]
    if how == 1:
        return torch.cat([tensor, tensor])
    if how == 2:
        return tensor.to(
            rng.choice([torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float64])
        )
    if how == 3:
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if how == 4:
        return tensor[None]
    if how == 5:
        return tensor[..., : rng.randrange(tensor.shape[-1] + 1)]
    if how == 6:
        return tensor[0]
    if how == 7:
        return tensor[:1].expand(len(tensor), *tensor.shape[1:])
    changed = tensor.clone()
    if changed.numel() and not changed.dtype.is_floating_point:
        values = [2**31 - 1, -1, -(2**31), 0, 17] if changed.dtype.is_signed else [255, 0, 17]
        changed.view(-1)[rng.randrange(changed.numel())] = rng.choice(values)
    return changed


# The calls


def described(name: str, arguments: list[Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, np.ndarray):
            return f"{value.dtype}{list(value.shape)}"
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{list(value.shape)}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({', '.join(map(one, value))})"
        return repr(value)[:60]  # not of a tensor whose memory is gone

    return f"{name}({', '.join(map(one, arguments))})"


def main(seed: int, num_calls: int, only: list[str]) -> None:
    pages = resource.getpagesize()
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * pages
    # What asks for much gets a MemoryError, not the machine's memory.
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), resource.RLIM_INFINITY))
    log = os.open(os.environ.get("FUZZ_LOG", os.devnull), os.O_WRONLY | os.O_CREAT, 0o600)
    rng = random.Random(seed)
    valid, found = recipes(), bindings()
    counts = dict.fromkeys(found, 0)
    missing = [name for name, value in found.items() if name not in valid and type(value) is not property]
    for name in only or found:
        for number in range(num_calls):
            if name in missing or name not in valid:
                call, arguments = found[name], [anything(rng) for _ in range(rng.randrange(8))]
                if type(call) is property:
                    owner = getattr(_native, name.split(".")[0])
                    call, arguments = call.fget, [rng.choice([anything(rng), owner.__new__(owner)])]
            else:
                call, arguments = valid[name]()
                if number == 0:
                    pass  # as it is: it has to succeed
                elif number % 4 == 3:
                    arguments = [anything(rng) for _ in range(rng.randrange(len(arguments) + 2))]
                else:
                    for at in rng.sample(range(len(arguments)), min(len(arguments), rng.choice([1, 1, 2]))):
                        arguments[at] = spoiled(arguments[at], rng)
            os.pwrite(log, f"seed {seed}: {described(name, arguments)[:900]}\n{'':<900}\n".encode(), 0)
            try:
                call(*arguments)
            except InvariantError:
                raise
            except Exception:
                if number == 0 and name in valid:
                    raise
            owner = getattr(call, "__self__", None)
            if type(owner) is _native.BlockManager:
                owner.check()
            counts[name] += 1
            if number % 16 == 0:
                gc.collect(0)
    print(json.dumps({"calls": counts, "without_a_recipe": missing}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
