"""Description of a checkpoint's quantized weights before a byte of them is read: the tensors of each weight.

A dense checkpoint has one tensor for each weight. A quantized one has several (codes, scales, zeros), under names of
its own, usually for its linear layers alone. A reader selects its tensors by the names, shapes and types of all; the
others are dense.

Cost: headers only. `CheckpointWeight.form` reads some thousand scales of a float32 tensor; `CheckpointWeight.read`
reads and unpacks its tensors at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from quire.errors import LoadError
from quire.weights.codes.code_form import CodeForm, FactorForm, packed_dtype
from quire.weights.codes.weight import QuantizedWeight

__all__ = [
    "FLOATS",
    "CheckpointModule",
    "CheckpointReader",
    "CheckpointWeight",
    "CheckpointWeights",
    "Headers",
    "Reader",
    "TensorHeader",
    "matrix",
    "mismatch",
    "prefixes_of",
    "require_parts",
    "require_type",
    "scales_form",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # of scales

_NUM_CHECKED = 4096  # scales


class TensorHeader(Protocol):
    """The header of a checkpoint tensor. `CheckpointTensor` of `quire.weights.sources` implements it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def saved_type(self) -> torch.dtype | str: ...


Headers = Mapping[str, TensorHeader]


@dataclass(frozen=True)
class CheckpointWeight:
    """One quantized weight of a checkpoint, with its tensors.

    name: of the tensor in a dense checkpoint, such as "model.layers.0.mlp.up_proj.weight".
    shape: [N, K] of a linear layer, [E, N, K] of experts.
    parts: the names of its tensors by the reader's keys.
    form: gives the form of the weight, or of each expert, from headers; its argument reads a tensor by name.
    unpack: makes the weight from its tensors by the same keys: one for each expert if `shape` has three sizes; then
        the first dimension of each tensor is the expert.
    transposed: a dense checkpoint has the experts as [E, K, N].
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    form: Callable[[Callable[[str], torch.Tensor]], CodeForm]
    unpack: Callable[[Mapping[str, torch.Tensor]], Sequence[QuantizedWeight]]
    transposed: bool = False

    def read(self, tensor: Callable[[str], torch.Tensor]) -> Sequence[QuantizedWeight]:
        """The weight, or its experts. tensor: reads the tensor of a name.

        *raises:* LoadError: the tensors do not fit each other.
        """
        return self.unpack({key: tensor(name) for key, name in self.parts.items()})

    def read_expert(self, tensor: Callable[[str], torch.Tensor], expert: int) -> QuantizedWeight:
        """One expert alone. *raises:* LoadError: as `read`."""
        of_expert = slice(expert, expert + 1)
        (weight,) = self.unpack({key: tensor(name)[of_expert] for key, name in self.parts.items()})
        return weight

    def dequantize(self, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The dense tensor in `dtype`, each value rounded once from float32."""
        if len(self.shape) == 2:
            return self.read(tensor)[0].dequantize().to(dtype)
        experts, outputs, inputs = self.shape
        dense = torch.empty(
            experts, *((inputs, outputs) if self.transposed else (outputs, inputs)), dtype=dtype
        )
        for expert in range(experts):
            values = self.read_expert(tensor, expert).dequantize()
            dense[expert] = values.T if self.transposed else values
        return dense


@dataclass(frozen=True)
class CheckpointWeights:
    """The selection of a reader from a checkpoint.

    weights: each once. dropped: unused tensors, such as the scales of activations.
    """

    weights: tuple[CheckpointWeight, ...]
    dropped: frozenset[str] = field(default_factory=frozenset)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors that are not dense."""
        return self.dropped | {part for weight in self.weights for part in weight.parts.values()}


@dataclass(frozen=True)
class CheckpointModule:
    """The module of a model that a tensor belongs to. name: in the model. classes: the names of its class and of its
    base classes."""

    name: str
    classes: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True)
class CheckpointReader:
    """The input of a reader.

    config: the quantization_config of its config.json. headers: of all tensors, by name. tensor: reads one; only for
    small tensors that give shapes. module_of: the module of a weight, by its name in the checkpoint.
    """

    config: Mapping[str, Any]
    headers: Headers
    tensor: Callable[[str], torch.Tensor]
    module_of: Callable[[str], CheckpointModule] = CheckpointModule


Reader = Callable[[CheckpointReader], CheckpointWeights]


def prefixes_of(headers: Iterable[str], suffix: str) -> list[str]:
    """Names of modules (with the last dot) that have a tensor named `suffix`."""
    return sorted(name.removesuffix(suffix) for name in headers if name.endswith("." + suffix))


def require_parts(name: str, parts: Iterable[str], headers: Headers) -> None:
    """*raises:* LoadError: the checkpoint lacks one of the tensors of the weight `name`."""
    if missing := [part for part in parts if part not in headers]:
        raise LoadError(f"cannot read the weight {name}: the checkpoint lacks {missing[0]}")


def matrix(name: str, part: str, headers: Headers, *types: torch.dtype) -> tuple[int, int]:
    """The two sizes of the tensor `part` of the weight `name`.

    *raises:* LoadError: it has another number of sizes, another type than `types`, or no values.
    """
    require_type(name, part, headers, *types)
    shape = tuple(headers[part].shape)
    if len(shape) != 2 or 0 in shape:
        raise mismatch(name, f"{part} of two sizes above 0,", "[rows, columns]", list(shape))
    return shape[0], shape[1]


def require_type(name: str, part: str, headers: Headers, *types: torch.dtype) -> None:
    """*raises:* LoadError: the tensor `part` of the weight `name` has another type."""
    if headers[part].saved_type not in types:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
        raise mismatch(name, f"{part} of", expected, str(headers[part].saved_type).removeprefix("torch."))


def scales_form(name: str, headers: Headers, tensor: Callable[[str], torch.Tensor]) -> FactorForm:
    """The packed form of the scales in the tensor `name`. Bytes are exponents. The first scales decide whether two
    bytes suffice for float32."""
    saved = headers[name].saved_type
    if saved == torch.uint8:
        return FactorForm(torch.bfloat16)
    if saved == torch.float32:
        return FactorForm(packed_dtype(tensor(name).flatten()[:_NUM_CHECKED]))
    return FactorForm(saved if isinstance(saved, torch.dtype) else torch.float32)


def mismatch(name: str, subject: str, expected: object, got: object) -> LoadError:
    return LoadError(f"cannot read the weight {name}: expected {subject} {expected}, got {got}")
