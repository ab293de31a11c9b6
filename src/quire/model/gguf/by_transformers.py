"""Architectures whose header transformers reads itself: the keys that its function asks for are those that are taken.

transformers has a function for each, which asks a mapping for what it needs, so that a key which it never asks for is
refused as every other key is that no reader takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.model.gguf.architecture import Architecture
from quire.model.gguf.header import GGUFHeader
from quire.model.gguf.rope import rotary_width

__all__ = ["ARCHITECTURES"]


class _Asked(Mapping[str, Any]):
    """The header as transformers' functions expect it. Keys of the architecture that are asked for are taken."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header

    def __getitem__(self, name: str) -> Any:
        header = self._header
        if name == "tokenizer.ggml.tokens":
            return header.num_words
        prefix = header.architecture + "."
        if name.startswith(prefix):
            return header.take(name.removeprefix(prefix))
        return header.source.value(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.source.field_names)

    def __len__(self) -> int:
        return len(self._header.source.field_names)

    def get(self, name: str, default: Any = None) -> Any:
        prefix = self._header.architecture + "."
        if name.startswith(prefix):
            return self._header.take(name.removeprefix(prefix), default)
        return self[name] if name in self._header.source.field_names else default


def _config(header: GGUFHeader) -> dict[str, Any]:
    from transformers.integrations.gguf.gguf_config_mapping import get_gguf_config

    asked: Any = _Asked(header)
    fields = get_gguf_config(asked, tuple(header.tensors))
    if header.architecture != "lfm2":
        layers = fields["num_hidden_layers"]
        recurrent = header.take("attention.recurrent_layers", None)
        if recurrent is not None:
            recurrent = header.each("attention.recurrent_layers", layers)
            fields["layer_types"] = ["linear_attention" if one else "full_attention" for one in recurrent]
    if (width := header.take("attention.key_length", None)) is not None:
        header.expect("attention.value_length", width)
        rotary_width(header, width, whole=False)
    header.expect("attention.causal", True)
    return fields


_NEXT_TOKENS = {"nextn.": "of the layer that guesses a further token, which is not run"}

ARCHITECTURES = {
    "qwen35": Architecture(_config, no_effect_tensors=_NEXT_TOKENS),
    "qwen35moe": Architecture(_config, no_effect_tensors=_NEXT_TOKENS),
    "lfm2": Architecture(_config),
}
