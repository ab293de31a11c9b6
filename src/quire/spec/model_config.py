"""A model's `config.json` read as a KV cache: one `LayerSpec` per decoder layer.

The only place with the configs' field names for heads, head sizes, windows, chunks and shared KV. The layers' kinds
come from transformers itself (`get_layer_types_and_kwargs`, from which its own `DynamicCache` is built); the shapes
from the per-layer fields. No model is built and no weights are read.
Not a promise that the model runs: `quire.model.prove` proves that on the model itself, and `PagedCache` refuses K/V of
another shape than stated here.

An indexer's keys (DSA) are separate layers, which follow the decoder's (`index_of`).

Refused by name, since they store something else than K and V, a latent (MLA) or an indexer's key per token: compressed
attention, indexers without a latent, and states that `state_spec` does not support.

Cost: O(layers), plus importing transformers on the first call.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, LoadError, UnsupportedModelError
from quire.spec.kv_formats import element_formats
from quire.spec.layer_spec import LayerSpec, Span
from quire.spec.state_spec import state_specs

__all__ = [
    "dtype_of",
    "layers_of",
    "longest_of",
    "max_length_of",
    "model_type_of",
    "read_config",
    "vocab_size_of",
]

_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_kv_heads", "n_head_kv")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "decoder_attention_heads",
)
_HEAD_DIM = ("head_dim", "kv_channels", "d_kv", "dim_head")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
# State layers by the prefix of a config field: transformers has one name for all of them.
_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
_INDEXED = "indexed_attention"  # with an indexer that chooses the tokens (DSA)
_NO_KV = "state"  # of a layer with a state alone
_NO_MEMORY = ("mlp", "moe")  # layers that store nothing
_STORED_BY_KIND = {
    _INDEXED: "an indexer's keys in addition to K and V that are no latent",
    "compressed_sparse_attention": "a row for several tokens, and an indexer's keys",
    "heavily_compressed_attention": "a row for many tokens",
}
_STATES = (
    (("kda_", "linear_head_dim"), "Kimi delta attention"),
    (("linear_key_head_dim",), "gated delta net"),
    (("linear_attn_",), "lightning attention"),
    (("lru_",), "RG-LRU"),
    (("mamba_", "ssm_", "state_size"), "Mamba"),
    (("conv_kernel", "cca_"), "convolution"),
)
_LENGTH = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "max_target_positions",
)


def model_type_of(config: Any) -> str:
    """transformers' name of this kind of model; "unnamed" if the config has none."""
    text = config.get_text_config(decoder=True)
    return str(getattr(text, "model_type", "") or getattr(config, "model_type", "") or "unnamed")


def layers_of(config: Any) -> tuple[LayerSpec, ...]:
    """The KV of each decoder layer.

    raises: ConfigError naming the field; UnsupportedModelError for layers that do not store K and V, or a latent, per
    token.
    """
    return _layers(_decoder_of(config.get_text_config(decoder=True)), model_type_of(config))


def _decoder_of(text: Any) -> Any:
    """The config of a decoder taken from an encoder-decoder, with the decoder's own layers and heads.

    transformers renames them only if the config includes the encoder.
    """
    is_half = hasattr(text, "decoder_layers") and hasattr(text, "encoder_layers")
    if not is_half or getattr(text, "is_encoder_decoder", False):
        return text
    full_config = copy.deepcopy(text)
    full_config.is_encoder_decoder = True
    decoder = full_config.get_text_config(decoder=True)
    decoder.is_encoder_decoder = False
    return decoder


def dtype_of(config: Any) -> str:
    """The config's own dtype; a config without one counts as float32, as in transformers. *raises:* ConfigError."""
    for part in (config.get_text_config(decoder=True), config):
        value = getattr(part, "dtype", None)
        if value is not None:
            name = str(value).removeprefix("torch.")
            if name not in element_formats():
                raise ConfigError(
                    f"expected dtype of {sorted(element_formats())} in the config of {model_type_of(config)}, got "
                    f"{name!r}; pass dtype= for the KV cache"
                )
            return name
    return "float32"


def vocab_size_of(config: Any) -> int | None:
    """Number of token ids of the (text) model; None if the config has none."""
    return _optional(config.get_text_config(decoder=True), ("vocab_size",), model_type_of(config))


def max_length_of(config: Any) -> int | None:
    """Number of positions of the (text) model of a transformers config; None if it has no limit.

    Rotary embeddings that are scaled from a stated original length reach factor times that, even if the config still
    has the length before scaling (the recipe of Qwen's model cards for yarn).
    """
    text = config.get_text_config(decoder=True)
    if any(getattr(text, name, None) == -1 for name in _LENGTH):  # XLNet's value for no limit
        return None
    declared_value = _optional(text, _LENGTH, model_type_of(config))
    return None if declared_value is None else max(declared_value, _stretched_length(text))


def longest_of(config: Any) -> int | None:
    """Largest permitted number of positions: `max_length_of`, or its linearly scaled value.

    With linear scaling a config may give the length before or after scaling; only its user knows which.
    """
    declared_value, rotary = max_length_of(config), _rotary(config.get_text_config(decoder=True))
    is_linear = rotary.get("rope_type", rotary.get("type")) == "linear"
    return (
        int(declared_value * max(1.0, rotary.get("factor") or 1.0))
        if declared_value is not None and is_linear
        else declared_value
    )


def _stretched_length(text: Any) -> int:
    """Factor times the original length, if the config states both; else 0.

    For llama3 and longrope the factor does not scale the length: their configs give the final length.
    """
    rotary = _rotary(text)
    factor, original = rotary.get("factor"), rotary.get("original_max_position_embeddings")
    if rotary.get("rope_type", rotary.get("type")) not in ("yarn", "linear") or not factor or not original:
        return 0
    return int(factor * original)


def _rotary(text: Any) -> Mapping[str, Any]:
    """A config's rotary settings; if they differ by kind of layer, those of full attention."""
    declared_value = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if isinstance(declared_value, Mapping) and isinstance(declared_value.get("full_attention"), Mapping):
        declared_value = declared_value["full_attention"]
    return declared_value if isinstance(declared_value, Mapping) else {}


def read_config(config: Any | str | Path | Mapping[str, Any]) -> Any:
    """A transformers config object from an object, path or mapping; no network, no remote code.

    A `model_type` that this transformers does not have is read by its field names alone.
    """
    if isinstance(config, (str, Path)):
        config = _read_file(Path(config).expanduser())
    if not isinstance(config, Mapping):
        if not hasattr(config, "get_text_config"):
            raise ConfigError(
                "expected a transformers config, a dict, or the path of a model folder or config.json, "
                f"got {type(config).__name__}"
            )
        return config
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = dict(config)
    model_type = fields.pop("model_type", None)
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    try:
        if is_known:
            return AutoConfig.for_model(model_type, **fields)
        generic = PreTrainedConfig(**fields)
        generic.model_type = model_type or ""  # type: ignore[misc]  # a class attribute of known types
        return generic
    except Exception as error:  # strict config classes raise many kinds
        raise ConfigError(
            f"expected a config that transformers can read, got one it refuses (model_type {model_type!r}): "
            f"{_one_line(error)}"
        ) from error


def _read_file(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(
            f"expected a model folder or config.json, cannot read {file}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"expected JSON in {file}, got something else: {_one_line(error)}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"expected a JSON object in {file}, got a {type(fields).__name__}")
    return fields


def _layers(text: Any, model_type: str) -> tuple[LayerSpec, ...]:
    from transformers.cache_utils import get_layer_types_and_kwargs

    _refuse_other_state(text, model_type)
    num_layers = _required(text, ("num_hidden_layers", "n_layer", "n_layers"), model_type)
    declared = getattr(text, "layer_types", None)
    if declared is not None and len(declared) < num_layers:
        raise ConfigError(
            f"expected {num_layers} entries (num_hidden_layers) in layer_types of {model_type}, got {len(declared)}"
        )
    if getattr(text, "num_hidden_layers", None) is None:
        text.num_hidden_layers = num_layers  # a config read by its fields; the next call reads this one
    try:
        kinds, options = get_layer_types_and_kwargs(text)
        configs = [text.per_layer_config[index] for index in range(num_layers)]
    except Exception as error:  # any error of a config's own properties
        raise ConfigError(
            f"expected layer fields transformers can interpret in the config of {model_type}, "
            f"got {type(error).__name__}: {_one_line(error)}"
        ) from error
    missing = num_layers - len(kinds)  # transformers before 5.23 leaves out layers that store nothing
    kinds, options = [*kinds, *["dummy"] * missing], [*options, *[{}] * missing]
    state_layers = {state.layer for state in state_specs(text)}
    kinds = [
        _NO_KV if kind in _NO_MEMORY else _attention_kind(kind, index in state_layers)
        for index, kind in enumerate(kinds)
    ]
    indexed = [index for index, kind in enumerate(kinds) if kind == _INDEXED and _has_latent(configs[index])]
    for index in indexed:
        kinds[index] = "full_attention"
    unsupported = Counter(k for k in kinds if k not in (*_ATTENDING, _NO_KV, "dummy"))
    if unsupported:
        listed = ", ".join(
            f"{count} {_describe_kind(kind, text)}" for kind, count in sorted(unsupported.items())
        )
        raise UnsupportedModelError(
            f"model type {model_type}: expected full, sliding or chunked attention in every layer, got {listed} "
            f"of {num_layers} layers, which Quire does not support"
        )
    if not state_layers:
        _refuse_without_heads(text, configs[0], model_type)
    producers = _producers(text, kinds, num_layers, model_type)
    skipped_layers = frozenset(
        getattr(text, "cross_attention_layers", None) or ()
    )  # they are passed by without an image
    layers: list[LayerSpec] = []
    for index in range(num_layers):
        producer = producers[index]
        if (
            kinds[index] == _NO_KV
            or index in skipped_layers
            or (producer is None and kinds[index] == "dummy")
        ):
            layers.append(LayerSpec(Span(), 0, 0, 0))
            continue
        source = index if producer is None else producer
        span = _span(kinds[source], options[source].get("sliding_window"), model_type)
        if (rank := _optional(configs[source], ("kv_lora_rank",), model_type, source)) is not None:
            rotated_dim = getattr(configs[source], "qk_rope_head_dim", None)  # 0 without rotation
            rotated_dim = _positive(rotated_dim, "qk_rope_head_dim", model_type) if rotated_dim else 0
            layers.append(LayerSpec(span, 1, rank + rotated_dim, rank, producer, latent=True))
            continue
        heads, k_dim, v_dim = _shape(configs[source], source, span.kind == "window", model_type)
        layers.append(LayerSpec(span, heads, k_dim, v_dim, producer))
    return (*layers, *_index_keys(text, configs, indexed, model_type))


def _has_latent(layer: Any) -> bool:
    return getattr(layer, "kv_lora_rank", None) is not None


def _index_keys(text: Any, configs: list[Any], indexed: list[int], model_type: str) -> list[LayerSpec]:
    """The keys of each layer's indexer; a "shared" layer uses the choice of the layer before and has no keys."""
    modes = getattr(text, "indexer_types", None) or ["full"] * len(configs)
    layers: list[LayerSpec] = []
    for index in indexed:
        if modes[index] != "shared":
            size = _required(configs[index], ("index_head_dim",), model_type, index)
            layers.append(LayerSpec(Span(), 1, size, size, latent=True, index_of=index))
    return layers


def _attention_kind(kind: str, has_state: bool) -> str:
    """The kind of attention that a layer has in addition to its state; `_NO_KV` for a state alone."""
    if not has_state:
        return kind
    return {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}.get(kind, _NO_KV)


def _describe_kind(kind: str, text: Any) -> str:
    """A kind of layer with what it stores or, if models use the name differently, with this model's meaning."""
    if kind in _STORED_BY_KIND:
        return f"{kind} ({_STORED_BY_KIND[kind]})"
    if kind not in ("linear_attention", "hybrid", "hybrid_sliding"):
        return kind
    fields = text.to_dict()
    meaning = next(
        (name for prefixes, name in _STATES if any(field.startswith(prefixes) for field in fields)), ""
    )
    return f"{kind} ({meaning})" if meaning else kind


def _refuse_other_state(text: Any, model_type: str) -> None:
    """Refuse models whose config shows that they do not store K and V per token."""
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model type {model_type}: expected a decoder-only model, got an encoder-decoder one"
        )


def _refuse_without_heads(text: Any, layer: Any, model_type: str) -> None:
    """Refuse a known type whose configs have no attention heads, so that no field is missing."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    is_known = model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] is type(text)
    if is_known and not any(hasattr(layer, name) for name in _HEADS):
        raise UnsupportedModelError(
            f"model type {model_type}: its layers have no attention heads: they store no K and V, and no state that "
            "quire supports"
        )


def _producers(text: Any, kinds: list[str], num_layers: int, model_type: str) -> list[int | None]:
    """For each layer the layer whose KV it reads instead of storing its own, or None."""
    num_sharing = int(
        getattr(text, "num_kv_shared_layers", None) or 0
    )  # the last ones; before 5.23 all that is said
    modes = list(
        getattr(text, "kv_sharing_modes", None)
        or [None] * (num_layers - num_sharing) + ["reuse"] * num_sharing
    )
    declared = list(getattr(text, "layer_types", None) or kinds)
    sources = getattr(text, "kv_source_layers", None)
    producers: list[int | None] = []
    for index in range(num_layers):
        if modes[index] != "reuse":
            if kinds[index] == "dummy" and (index >= len(declared) or declared[index] not in _NO_MEMORY):
                kind = declared[index] if index < len(declared) else "dummy"
                raise UnsupportedModelError(
                    f"model type {model_type}: layer {index} has no attention (its kind is {kind}); such layers come "
                    "in a later version"
                )
            producers.append(None)
        elif sources is not None:
            producers.append(int(sources[index]))
        else:  # the last layer of the same kind that stores its own KV
            producers.append(
                max(
                    other
                    for other in range(index)
                    if modes[other] != "reuse" and declared[other] == declared[index]
                )
            )
    return producers


def _span(kind: str, size: Any, model_type: str) -> Span:
    if kind == "full_attention":
        return Span()
    field = "sliding_window" if kind == "sliding_attention" else "attention_chunk_size"
    return Span("window" if field == "sliding_window" else "chunked", _positive(size, field, model_type))


def _shape(layer: Any, index: int, windowed: bool, model_type: str) -> tuple[int, int, int]:
    """(num_kv_heads, k_head_dim, v_head_dim) of one layer."""
    attention = getattr(layer, "attn_config", None) or layer  # dbrx and mpt have a nested config
    prefix = ("swa_",) if windowed and getattr(layer, "swa_num_key_value_heads", None) else ()
    names = tuple(p + name for p in (*prefix, "") for name in _KV_HEADS)
    heads = _required(layer, tuple(p + name for p in (*prefix, "") for name in _HEADS), model_type, index)
    if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
        kv_heads = 1  # gpt_bigcode, falcon
    else:
        kv_heads = _optional(layer, names, model_type, index)
        if kv_heads is None and attention is not layer:
            kv_heads = _optional(attention, ("kv_n_heads",), model_type, index)
        kv_heads = kv_heads or heads
    if windowed and model_type == "mimo_v2_flash":
        kv_heads *= 2  # hard-coded in its attention module, not in its config
    head_dim = _optional(
        layer, tuple(p + name for p in (*prefix, "") for name in _HEAD_DIM), model_type, index
    )
    if head_dim is None:
        hidden = _required(layer, _HIDDEN, model_type, index)
        if hidden % heads:
            raise ConfigError(
                f"expected hidden_size to be a multiple of num_attention_heads where head_dim is missing in the "
                f"config of {model_type}, got {hidden} and {heads}"
            )
        head_dim = hidden // heads
    v_head_dim = (
        _optional(layer, tuple(p + "v_head_dim" for p in (*prefix, "")), model_type, index) or head_dim
    )
    if heads % kv_heads:
        raise ConfigError(
            f"expected num_attention_heads to be a multiple of num_key_value_heads in the config of {model_type}, "
            f"got {heads} and {kv_heads}"
        )
    return kv_heads, head_dim, v_head_dim


def _optional(config: Any, names: tuple[str, ...], model_type: str, index: int | None = None) -> int | None:
    """The first set field among `names`; a list has one entry per layer."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and index is not None and index < len(value):
            value = value[index]
        if value is not None:
            return _positive(value, name, model_type)
    return None


def _required(config: Any, names: tuple[str, ...], model_type: str, index: int | None = None) -> int:
    value = _optional(config, names, model_type, index)
    if value is None:
        raise ConfigError(f"expected {names[0]} in the config of {model_type}, got none")
    return value


def _positive(value: Any, name: str, model_type: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"expected a positive integer as {name} in the config of {model_type}, got {value!r}"
        )
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
