"""The header of one GGUF file: each key of its architecture is taken by name, and the rest is refused by name.

Invariants:
    H1  Every key `{architecture}.*` is taken by the architecture's reader, or stands in `NO_EFFECT` or in the reader's
        own list of keys that change no answer, or the file is refused by that key (`refuse_rest`).
    H2  A value that the model cannot have is refused by its key (`expect`).

Not here: which key means what (the modules beside this one), and the tensors' own rule (`load_gguf`).

Cost: a look at each key; a small tensor is read where a reader asks for its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from quire.errors import LoadError
from quire.model.sources import CheckpointTensor, GGUFSource, widen

__all__ = ["NO_EFFECT", "GGUFHeader"]

_REQUIRED = object()

NO_EFFECT: Mapping[str, str] = {
    "vocab_size": "the embedding's rows are counted",
    "rope.scaling.finetuned": "a note of how the model was trained",
    "pooling_type": "of embeddings of whole texts, which the model does not give here",
    "tensor_data_layout": "the names of the tensors tell their layout",
}
"""Keys of every architecture that change no answer, and why."""


class GGUFHeader:
    """The keys `{architecture}.*` of `source`, and its small tensors."""

    def __init__(self, source: GGUFSource) -> None:
        self.source = source
        self.architecture = source.architecture
        self.tensors: dict[str, CheckpointTensor] = {tensor.name: tensor for tensor in source}
        prefix = self.architecture + "."
        self._values = {
            name.removeprefix(prefix): name for name in source.field_names if name.startswith(prefix)
        }
        self.taken: set[str] = set()
        """Keys that a reader has asked for, whether the file has them or not."""
        self.latest = ""
        """The key that was asked for last: where a value is of no use, that one had it."""
        self._placeless: set[str] = set()  # tensors that are in the config, or of layers that are not run

    @property
    def num_words(self) -> int:
        """Rows of the embedding. *raises:* LoadError: the file has none."""
        if "token_embd.weight" not in self.tensors:
            raise LoadError(f"expected the tensor token_embd.weight, {self.source.path} has none")
        return self.tensors["token_embd.weight"].shape[0]

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of the key `{architecture}.{key}`: a number, text, truth value, or a list of such.

        *raises:* LoadError: the file has no such key, and there is no default.
        """
        self.taken.add(key)
        self.latest = key
        if key in self._values:
            return self.source.value(self._values[key])
        if default is _REQUIRED:
            raise LoadError(
                f"expected the key {self.architecture}.{key}, {self.source.path} has none - in its header"
            )
        return default

    def size(self, key: str, default: Any = _REQUIRED) -> int:
        """As `one`, of a number above 0. *raises:* LoadError: as `one`; it is none."""
        value = self.one(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(key, value, "a whole number above 0")
        return value

    def number(self, key: str, default: float) -> float:
        """As `take`, of a finite number above 0. *raises:* LoadError: it is none."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.refusal(key, value, "a number above 0")
        return float(value)

    def one(self, key: str, default: Any = _REQUIRED) -> Any:
        """As `take`; of a list whose values are all the same, that value.

        *raises:* LoadError: as `take`; the values of the list differ.
        """
        value = self.take(key, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.refusal(key, value, "one value for all layers")
        return value[0]

    def each(self, key: str, count: int) -> list[Any]:
        """As `take`; one value for each of `count` layers. *raises:* LoadError: fewer values."""
        value = self.take(key)
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count:
            raise self.refusal(key, value, f"a value for each of {count} layers")
        return values[:count]

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse the file if it has the key with a value that is none of `allowed`."""
        value = self.take(key, allowed[0])
        if value not in allowed and not (isinstance(value, list) and all(one in allowed for one in value)):
            raise self.refusal(key, value, " or ".join(map(str, allowed)))

    def tensor(self, name: str) -> torch.Tensor | None:
        """The values of a small tensor, in float32, which becomes a part of the config; None where there is none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        self._placeless.add(name)
        return widen(tensor)

    @property
    def weights(self) -> list[CheckpointTensor]:
        """The tensors that the model must have places for, in the file's order."""
        return [tensor for name, tensor in self.tensors.items() if name not in self._placeless]

    def leave_layers(self, count: int) -> None:
        """Tensors of layers from number `count` on are not of the model."""
        for name in self.tensors:
            if name.startswith("blk.") and int(name.split(".")[1]) >= count:
                self._placeless.add(name)

    def num_layers(self) -> int:
        """`block_count`. *raises:* LoadError: the file has tensors of another number of layers."""
        found = {name.split(".")[1] for name in self.tensors if name.startswith("blk.")}
        if (count := self.size("block_count")) != len(found):
            raise self.refusal("block_count", count, f"{len(found)}, as the tensors have it")
        return count

    def special_ids(self) -> dict[str, Any]:
        """The ids of special tokens as a config names them; None for one that the vocabulary does not have."""
        named = {"bos": "bos", "eos": "eos", "pad": "padding"}
        return {
            f"{name}_token_id": self.source.field(f"tokenizer.ggml.{key}_token_id")
            for name, key in named.items()
        }

    def refusal(self, key: str, value: Any, expected: str) -> LoadError:
        """The error that refuses the file by the value of a key."""
        return LoadError(
            f"expected {self.architecture}.{key} to be {expected}, got {value!r} - in the header of "
            f"{self.source.path}. Take the model as safetensors."
        )

    def refuse_rest(self, no_effect: Mapping[str, str]) -> None:
        """Refuse the file if it has a key that was not taken. no_effect: keys beside `NO_EFFECT` that change nothing.

        *raises:* LoadError: it names the key.
        """
        rest = sorted(set(self._values) - self.taken - no_effect.keys() - NO_EFFECT.keys())
        if rest:
            raise LoadError(
                f"expected keys of the architecture {self.architecture} that are read here, got "
                f"{self.architecture}.{rest[0]} = {self.source.value(self._values[rest[0]])!r}"
                f"{f' and {len(rest) - 1} more' if len(rest) > 1 else ''} - in the header of {self.source.path}; "
                "answers would differ from the model's. Take the model as safetensors."
            )
