"""The header of one GGUF file: the reader reads each key of its architecture by name; an unread key is refused.

Invariants:
    H1  Every key `{architecture}.*` is read by the architecture's reader, or is in `NO_EFFECT` or in the reader's own
        list of keys that do not change the output; otherwise the file is refused by that key (`refuse_unread`).
    H2  A value that the model cannot have is refused by its key (`expect`).

Not here: the meaning of the keys (the modules next to this one), and the rule for tensors (`load_gguf`).

Cost: one check of each key; a small tensor is read when a reader needs its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from quire.errors import LoadError
from quire.weights.sources import CheckpointTensor, GGUFSource, to_float32

__all__ = ["NO_EFFECT", "GGUFHeader"]

_REQUIRED = object()

NO_EFFECT: Mapping[str, str] = {
    "vocab_size": "the embedding has one row a word",
    "rope.scaling.finetuned": "a note of how the model was trained",
    "pooling_type": "for embeddings of whole texts, which the model does not give here",
    "tensor_data_layout": "the names of the tensors give their layout",
}
"""Keys of every architecture that do not change the output, with the reason."""


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
        self.read_keys: set[str] = set()
        """Keys that a reader has requested, present in the file or not."""
        self.last_key = ""
        """The last requested key: an error in a reader is about its value."""
        self._unplaced: set[str] = set()  # tensors that are in the config, or of layers that do not run

    @property
    def num_words(self) -> int:
        """Rows of the embedding. *raises:* LoadError: the file has none."""
        if "token_embd.weight" not in self.tensors:
            raise LoadError(f"expected the tensor token_embd.weight, {self.source.path} has none")
        return self.tensors["token_embd.weight"].shape[0]

    def read(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of the key `{architecture}.{key}`: a number, text, truth value, or a list of such.

        *raises:* LoadError: the file has no such key, and there is no default.
        """
        self.read_keys.add(key)
        self.last_key = key
        if key in self._values:
            return self.source.value(self._values[key])
        if default is _REQUIRED:
            raise LoadError(
                f"expected the key {self.architecture}.{key}, {self.source.path} has none - in its header"
            )
        return default

    def size(self, key: str, default: Any = _REQUIRED) -> int:
        """As `read_uniform`, for a number above 0. *raises:* LoadError: as `read_uniform`; another value."""
        value = self.read_uniform(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(key, value, "a whole number above 0")
        return value

    def number(self, key: str, default: float) -> float:
        """As `read`, for a finite number above 0. *raises:* LoadError: another value."""
        value = self.read(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.refusal(key, value, "a number above 0")
        return float(value)

    def read_uniform(self, key: str, default: Any = _REQUIRED) -> Any:
        """As `read`; for a list of equal values, that value.

        *raises:* LoadError: as `read`; the values of the list differ.
        """
        value = self.read(key, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.refusal(key, value, "one value for all layers")
        return value[0]

    def read_per_layer(self, key: str, count: int) -> list[Any]:
        """As `read`; one value for each of `count` layers. *raises:* LoadError: fewer values."""
        value = self.read(key)
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count:
            raise self.refusal(key, value, f"a value for each of {count} layers")
        return values[:count]

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse the file if it has the key with a value outside `allowed`."""
        value = self.read(key, allowed[0])
        if value not in allowed and not (isinstance(value, list) and all(item in allowed for item in value)):
            raise self.refusal(key, value, " or ".join(map(str, allowed)))

    def tensor(self, name: str) -> torch.Tensor | None:
        """The values, in float32, of a small tensor that becomes part of the config; None if the file has none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        self._unplaced.add(name)
        return to_float32(tensor)

    @property
    def weights(self) -> list[CheckpointTensor]:
        """The tensors that must become parameters of the model, in the file's order."""
        return [tensor for name, tensor in self.tensors.items() if name not in self._unplaced]

    def ignore_layers(self, count: int) -> None:
        """Ignore the tensors of layers from number `count` on."""
        for name in self.tensors:
            if name.startswith("blk.") and int(name.split(".")[1]) >= count:
                self._unplaced.add(name)

    def num_layers(self) -> int:
        """`block_count`. *raises:* LoadError: the tensors are of another number of layers."""
        layer_numbers = {name.split(".")[1] for name in self.tensors if name.startswith("blk.")}
        if (count := self.size("block_count")) != len(layer_numbers):
            raise self.refusal(
                "block_count", count, f"{len(layer_numbers)}, the number of layers with tensors"
            )
        return count

    def special_ids(self) -> dict[str, Any]:
        """The ids of special tokens by a config's names; None for one that the vocabulary lacks."""
        named = {"bos": "bos", "eos": "eos", "pad": "padding"}
        return {
            f"{name}_token_id": self.source.field(f"tokenizer.ggml.{key}_token_id")
            for name, key in named.items()
        }

    def refusal(self, key: str, value: Any, expected: str) -> LoadError:
        """The error for a file that is refused by the value of a key."""
        return LoadError(
            f"expected {self.architecture}.{key} to be {expected}, got {value!r} - in the header of "
            f"{self.source.path}. Take the model as safetensors."
        )

    def refuse_unread(self, no_effect: Mapping[str, str]) -> None:
        """Refuse the file if it has an unread key. no_effect: further keys that change nothing, besides `NO_EFFECT`.

        *raises:* LoadError: names the key.
        """
        unread = sorted(set(self._values) - self.read_keys - no_effect.keys() - NO_EFFECT.keys())
        if unread:
            raise LoadError(
                f"expected keys of the architecture {self.architecture} that are read here, got "
                f"{self.architecture}.{unread[0]} = {self.source.value(self._values[unread[0]])!r}"
                f"{f' and {len(unread) - 1} more' if len(unread) > 1 else ''} - in the header of {self.source.path}; "
                "answers would differ from the model's. Take the model as safetensors."
            )
