"""What a reader says of a checkpoint before a byte of its weights is read: which tensors together are which weight.

A plain checkpoint has one tensor for each weight. A quantized one has several (codes, scales, zeros), under names of
its own, and most often for its linear layers alone. A reader goes over the names, shapes and types of all tensors and
says which it takes; what it does not name is plain.

Cost: nothing is read but headers. `CheckpointWeight.form` looks at some thousand scales of a tensor of float32;
`CheckpointWeight.read` reads its tensors and unpacks them, once a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from quire.errors import LoadError
from quire.quantized.code_form import CodeForm, FactorForm, packed_dtype
from quire.quantized.weight import QuantizedWeight

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

_LOOKED_AT = 4096  # scales


class TensorHeader(Protocol):
    """A tensor of a checkpoint: what its header says. `CheckpointTensor` of `quire.model.sources` is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def saved_type(self) -> torch.dtype | str: ...


Headers = Mapping[str, TensorHeader]


@dataclass(frozen=True)
class CheckpointWeight:
    """One weight of a checkpoint, in the tensors that hold it.

    name: of the tensor that a plain checkpoint has in their place, as "model.layers.0.mlp.up_proj.weight".
    shape: [N, K] of a linear layer, [E, N, K] of experts.
    parts: the names of its tensors by what they are to the reader.
    form: what the weight, or each expert, will be, told by headers. tensor: gives the tensor of a name, to look into.
    unpack: makes the weight of its tensors by the same keys: one for each expert, where `shape` has three sizes; each
        of its tensors has the experts first then.
    transposed: a plain checkpoint has experts as [E, K, N].
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    form: Callable[[Callable[[str], torch.Tensor]], CodeForm]
    unpack: Callable[[Mapping[str, torch.Tensor]], Sequence[QuantizedWeight]]
    transposed: bool = False

    def read(self, tensor: Callable[[str], torch.Tensor]) -> Sequence[QuantizedWeight]:
        """The weight, or its experts. tensor: gives the tensor of a name.

        *raises:* LoadError: the tensors do not fit each other.
        """
        return self.unpack({key: tensor(name) for key, name in self.parts.items()})

    def read_expert(self, tensor: Callable[[str], torch.Tensor], expert: int) -> QuantizedWeight:
        """One of the experts alone. *raises:* LoadError: as `read`."""
        of_expert = slice(expert, expert + 1)
        (weight,) = self.unpack({key: tensor(name)[of_expert] for key, name in self.parts.items()})
        return weight

    def widened(self, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The plain tensor in `dtype`, each value rounded once from float32."""
        if len(self.shape) == 2:
            return self.read(tensor)[0].dequantize().to(dtype)
        experts, outputs, inputs = self.shape
        plain = torch.empty(
            experts, *((inputs, outputs) if self.transposed else (outputs, inputs)), dtype=dtype
        )
        for expert in range(experts):
            values = self.read_expert(tensor, expert).dequantize()
            plain[expert] = values.T if self.transposed else values
        return plain


@dataclass(frozen=True)
class CheckpointWeights:
    """What a reader takes of a checkpoint.

    weights: each once. dropped: tensors that are of no use here, as the scales of activations.
    """

    weights: tuple[CheckpointWeight, ...]
    dropped: frozenset[str] = field(default_factory=frozenset)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors that are not plain."""
        return self.dropped | {part for weight in self.weights for part in weight.parts.values()}


@dataclass(frozen=True)
class CheckpointModule:
    """The module of a model that a tensor is of. name: the model's own. classes: the names of its class and of those
    that it is derived from."""

    name: str
    classes: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True)
class CheckpointReader:
    """What a reader is given.

    config: the quantization_config of its config.json. headers: of all tensors, by name. tensor: gives one; only the
    few small ones that say shapes are asked for. module_of: the module that has the weights of a name, by its name in
    the checkpoint.
    """

    config: Mapping[str, Any]
    headers: Headers
    tensor: Callable[[str], torch.Tensor]
    module_of: Callable[[str], CheckpointModule] = CheckpointModule


Reader = Callable[[CheckpointReader], CheckpointWeights]


def prefixes_of(headers: Iterable[str], suffix: str) -> list[str]:
    """Names of modules (with the last dot) that have a tensor called `suffix`."""
    return sorted(name.removesuffix(suffix) for name in headers if name.endswith("." + suffix))


def require_parts(name: str, parts: Iterable[str], headers: Headers) -> None:
    """*raises:* LoadError: one of the tensors that make the weight `name` is not in the checkpoint."""
    if missing := [part for part in parts if part not in headers]:
        raise LoadError(f"cannot read the weight {name}: the checkpoint lacks {missing[0]}")


def matrix(name: str, part: str, headers: Headers, *types: torch.dtype) -> tuple[int, int]:
    """The two sizes of the tensor `part` of the weight `name`.

    *raises:* LoadError: it has another number of them, none of `types`, or no values.
    """
    require_type(name, part, headers, *types)
    shape = tuple(headers[part].shape)
    if len(shape) != 2 or 0 in shape:
        raise mismatch(name, f"{part} of two sizes above 0,", "[rows, columns]", list(shape))
    return shape[0], shape[1]


def require_type(name: str, part: str, headers: Headers, *types: torch.dtype) -> None:
    """*raises:* LoadError: the tensor `part` of the weight `name` is of none of these."""
    if headers[part].saved_type not in types:
        expected = " or ".join(str(one).removeprefix("torch.") for one in types)
        raise mismatch(name, f"{part} of", expected, str(headers[part].saved_type).removeprefix("torch."))


def scales_form(name: str, headers: Headers, tensor: Callable[[str], torch.Tensor]) -> FactorForm:
    """How the scales of the tensor `name` will be held. Bytes are exponents. Whether two bytes hold numbers of float32
    the first ones tell."""
    stored = headers[name].saved_type
    if stored == torch.uint8:
        return FactorForm(torch.bfloat16)
    if stored == torch.float32:
        return FactorForm(packed_dtype(tensor(name).flatten()[:_LOOKED_AT]))
    return FactorForm(stored if isinstance(stored, torch.dtype) else torch.float32)


def mismatch(name: str, what: str, expected: object, got: object) -> LoadError:
    return LoadError(f"cannot read the weight {name}: expected {what} {expected}, got {got}")
