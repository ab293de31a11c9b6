"""GGUF files as models: the meaning of each key of a header and of each tensor, one module a family of architectures.

    header           the keys of a file: used, without effect, or refused
    rope_parameters  rotary positions: base, scaling, tensors of factors
    names            the parameter of each tensor
    architecture     the reader of one architecture, and the fields that all decoders share
    the others       the families

A new architecture is an entry of its family's `ARCHITECTURES`, or a new module in `_FAMILIES`.
"""

from quire.weights.gguf import (
    gemma,
    gemma4,
    granite,
    layer_norm,
    lfm2,
    llama,
    mamba,
    mixtures,
    phi,
    qwen,
    qwen35,
)
from quire.weights.gguf.architecture import Architecture
from quire.weights.gguf.header import NO_EFFECT, GGUFHeader

__all__ = ["ARCHITECTURES", "NO_EFFECT", "Architecture", "GGUFHeader"]

_FAMILIES = (llama, qwen, gemma, gemma4, granite, phi, layer_norm, mamba, mixtures, qwen35, lfm2)

ARCHITECTURES: dict[str, Architecture] = {
    name: architecture for family in _FAMILIES for name, architecture in family.ARCHITECTURES.items()
}
"""By their names in files."""
