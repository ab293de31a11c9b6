"""Loads a model and its tokenizer: the embedded one, a folder, a GGUF file, a Hub id, or a model that is loaded
already.

Not a preparation: `prepare` changes the model, `load` does not. Every failure is one line that says what was given and
what is wrong: a path that does not exist is never looked up on the network, weights that are truncated or incomplete
never become a model.

Cost: reading the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from quire import hub
from quire.errors import ArgumentError, LoadError, QuireError, UnsupportedModelError
from quire.load_progress import observer
from quire.memory.heap import give_back_freed
from quire.saved_folder import SavedFolder
from quire.spec import KVFormat, KVSpec, element_formats, format_of
from quire.spec.weight_formats import WeightFormats
from quire.weights.checkpoint_files import open_weights, refuse_adapter
from quire.weights.codes import CodeForm, readers
from quire.weights.config_file import check_config
from quire.weights.experts import is_experts
from quire.weights.file_ranges import FileRanges, MappedFiles
from quire.weights.generation_config import GREEDY, sampling_defaults
from quire.weights.load_gguf import (
    end_ids,
    gguf_config,
    load_gguf_model,
    load_gguf_tokenizer,
    planned_gguf_codes,
)
from quire.weights.load_quantized import (
    dense_config,
    load_quantized,
    planned_codes,
    quantization_of,
    refuse_other_shapes,
)
from quire.weights.packed_parameter import PackedParameter
from quire.weights.quantized_experts import ExpertForms
from quire.weights.saved_codes import quantize_saved
from quire.weights.saved_weights import SavedWeights
from quire.weights.sources import (
    GGUFSource,
    LiveSource,
    SafetensorsSource,
    WeightSource,
    dequantizer_versions,
    is_gguf,
)
from quire.weights.tokenizer import (
    TOKENIZER_FILES,
    Vocabulary,
    gguf_vocabulary,
    planned_vocabulary,
    release_copies,
)
from quire.weights.transformers_progress import without_progress_bars

__all__ = ["EMBEDDED", "LoadedModel", "UnloadedModel", "load", "load_tokenizer", "without_weights"]

EMBEDDED = Path(__file__).parent / "embedded"

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_log = logging.getLogger("quire")
# Prefixes of a language model's tensors within a larger model, and in the model alone.
_NAMES_OF_TEXT = {r"^model\.language_model\.": "model.", r"^language_model\.model\.": "model."}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A transformers model, with the facts that an engine needs.

    Args:
        model: on the CPU unless a caller gave it, in the mode (training or not) that it came in.
        tokenizer: None if there is none: then prompts are token ids.
        spec: its KV shape, in the dtype it computes in.
        name: for display: name of its folder or file, Hub id, "embedded".
        model_type: of its config, for messages.
        max_model_len: longest sequence its positions allow.
        vocab_size: ids are below it; the width of its logits.
        eos_token_ids: any of them ends a sequence.
        sampling_defaults: the defaults of its generation config for requests (`generation_config`).
        source: its checkpoint tensors, before they became tensors of `model`.
        file_ranges: the file ranges of its weights; None for a model that was loaded outside of Quire.
        saved_weights: the files that its quantized weights are read from.
        ignored_inputs: inputs of the model other than text, which are not supported here: "images", "audio".
        reader_versions: if weights are computed from codes in the source's files, the versions of the readers; else "".
    """

    model: PreTrainedModel
    tokenizer: Any
    spec: KVSpec
    name: str
    model_type: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    source: WeightSource
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    file_ranges: FileRanges | None = None
    saved_weights: tuple[SavedWeights, ...] = ()
    ignored_inputs: tuple[str, ...] = ()
    reader_versions: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return format_of(self.spec.dtype).torch_dtype


@without_progress_bars()
def load(
    source: str | Path | tuple[PreTrainedModel, Any] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: WeightFormats | None = None,
    is_dense: bool = False,
    saved_folder: SavedFolder | None = None,
    backend: str | None = None,
    generation_config: str = "auto",
) -> LoadedModel:
    """Load a model for causal language modelling.

    Args:
        source: None for the embedded model, a folder, a GGUF file, a Hub id, or (model, tokenizer or None).
        dtype: "auto" for the checkpoint's own (bfloat16 for a quantized GGUF file), or "float32", "bfloat16",
            "float16".
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: whether code of the checkpoint may run.
        weights: how its weights are rounded to codes, after those of a quantized checkpoint were dequantized; None:
            no rounding, quantized weights keep the checkpoint's codes.
        is_dense: a quantized checkpoint is dequantized; implied by `weights`.
        saved_folder: a folder that saves codes from one start to the next (`saved_codes`).
        backend: the back end that will run it and compute from codes, as of `quire.backends.extension`.
        generation_config: "auto" for the model's own; "none": only its end tokens are read.

    Raises:
        ArgumentError: an argument of the wrong form, or no such folder.
        LoadError: files missing or broken, or no such model.
        ConfigError, UnsupportedModelError: its config cannot be understood or served.
    """
    kv_format, is_dense = _format(dtype), is_dense or weights is not None
    has_rules = generation_config != "none"
    if isinstance(source, tuple):
        if weights is not None:
            raise ArgumentError(
                "expected a checkpoint, whose weights are rounded while it loads, got a model that is loaded already; "
                "give its folder or Hub id - in `weights`"
            )
        return _load_given(source, kv_format, has_rules)
    if source is not None and not isinstance(source, (str, Path)):
        raise ArgumentError(
            "expected a model as None, folder, GGUF file, Hub id or (model, tokenizer), got "
            f"{type(source).__name__}"
        )
    if (file := _gguf_file(source)) is not None:
        return _load_gguf(file, kv_format, weights, is_dense, saved_folder, backend, has_rules)
    where, local = _locate(source)
    name = "embedded" if source is None else Path(where).name if local else where
    if not local and (folder := hub.offline_folder(where, revision)) is not None:
        where, local = str(folder), True
    if local:
        _check_folder(Path(where))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if local:
        options["local_files_only"] = True
    elif revision is not None:
        options["revision"] = revision
    try:
        config = AutoConfig.from_pretrained(where, **options)
        if not local:
            refuse_adapter(where, revision, may_download=True)
        checkpoint = open_weights(config, where, None if local else revision, may_download=not local)
        observer().begin_phase("reading weights", _num_bytes(checkpoint))
        # Before the weights: building a tokenizer takes a multiple of the vocabulary's memory.
        tokenizer = _load_tokenizer(where, local, options, source)
        read = _from_pretrained(where, config, checkpoint, is_dense, weights, saved_folder, backend)
        loading = {"dtype": kv_format.torch_dtype if kv_format else "auto", "output_loading_info": True}
        loading |= {**options, **_attention(config)}
        loaded: Any
        try:
            loaded = read(_auto_class(config), **loading)
        except ImportError as error:  # a library for images or sound, which text does not need
            loaded = _text_part(where, config, loading, error, read)
        model, report, saved_weights = loaded
    except (UnsupportedModelError, LoadError, ArgumentError):
        raise
    except Exception as error:  # transformers, safetensors and the Hub client raise many kinds
        if "config.json" in str(error) and not local:
            refuse_adapter(where, revision, may_download=True)
        broken = "a safetensors file is broken or cut short: " if isinstance(error, SafetensorError) else ""
        raise LoadError(
            f"cannot load the model {_source_text(source, where)}: {broken}{_one_line(error)}"
        ) from error
    _refuse_missing(model, report, _source_text(source, where))
    file_ranges = MappedFiles()
    if weights is not None:
        if weights.has_rounding:
            observer().begin_phase("rounding weights")
        saved_weights = (*saved_weights, *quantize_saved(model, weights, file_ranges, saved_folder, backend))
    loaded_model = _describe(model, tokenizer, name, kv_format, has_rules)
    return replace(
        loaded_model,
        source=checkpoint or loaded_model.source,
        file_ranges=file_ranges,
        saved_weights=saved_weights,
        reader_versions="" if quantization_of(config) is None else _readers(),
    )


def _from_pretrained(
    where: str,
    config: Any,
    source: SafetensorsSource | None,
    is_dense: bool,
    rounded: WeightFormats | None,
    saved_folder: SavedFolder | None,
    backend: str | None,
) -> Callable[..., Any]:
    """A function of a class and options that returns (model, report, files of saved codes): by transformers, or by
    Quire if weights are quantized, or experts are to be rounded before they are stacked.

    is_dense: quantized weights are dequantized.
    """
    rounds_experts = rounded is not None and rounded.has_rounding and _may_have_experts(config)
    is_quantized = quantization_of(config) is not None
    if not is_quantized and (source is None or not rounds_experts):

        def read_dense(kind: Any, **options: Any) -> Any:
            model, report = kind.from_pretrained(where, ignore_mismatched_sizes=True, **options)
            refuse_other_shapes(report, where)
            return model, report, ()

        return read_dense

    def read(kind: Any, **options: Any) -> Any:
        model_config = options.pop("config", config)
        dtype = options.pop("dtype")
        if dtype == "auto":
            dtype = _dtype_of(model_config)
        if dtype is None:
            dtypes = [] if is_quantized or source is None else [tensor.saved_type for tensor in source]
            dtype = next((dtype for dtype in dtypes if dtype in _FLOATS), torch.bfloat16)
        return load_quantized(
            kind,
            where,
            source,
            model_config,
            dtype,
            is_dense=is_dense,
            rounded=rounded,
            saved_folder=saved_folder,
            backend=backend,
            **options,
        )

    return read


def _may_have_experts(config: Any) -> bool:
    """Whether the config has a number of experts, by its usual names: only memory depends on it."""
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _dtype_of(config: Any) -> torch.dtype | None:
    """The dtype in a model's config; None if it has none."""
    dtype = config.dtype or config.get_text_config(decoder=True).dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _language_config(config: Any, error: ImportError) -> Any:
    """The config of its language model alone. *raises:* `error`: transformers has no model of it."""
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise error
    if getattr(config, "tie_word_embeddings", None) is not None:
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def _text_part(
    where: str, config: Any, loading: dict[str, Any], error: ImportError, read: Callable[..., Any]
) -> Any:
    """`read` of the language model within a checkpoint whose other parts need a missing library.

    *raises:* `error`, if transformers has no model of this text alone.
    """
    text = _language_config(config, error)
    text.dtype = text.dtype or config.dtype
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    if (quantization := quantization_of(config)) is not None:
        text.quantization_config = quantization
    loaded = read(kind, config=text, key_mapping=_NAMES_OF_TEXT, **loading)
    _log.warning("%s: only its language model is loaded: %s", where, _one_line(error))
    return loaded


def _load_gguf(
    path: Path,
    kv_format: KVFormat | None,
    rounded: WeightFormats | None,
    is_dense: bool,
    saved_folder: SavedFolder | None,
    backend: str | None,
    has_rules: bool,
) -> LoadedModel:
    source = GGUFSource(path)
    try:
        dtype = kv_format.torch_dtype if kv_format else source.dtype
        # Before the weights: building a tokenizer takes a multiple of the vocabulary's memory.
        tokenizer = load_gguf_tokenizer(source, gguf_config(source))
        give_back_freed()
        observer().begin_phase("reading weights", _num_bytes(source))
        model, report, weights, saved_weights = load_gguf_model(
            source, dtype, is_dense=is_dense, rounded=rounded, saved_folder=saved_folder, backend=backend
        )
    except (LoadError, ArgumentError):
        raise
    except Exception as error:  # transformers, gguf and tokenizers raise many kinds
        raise LoadError(f"cannot load the model {str(path)!r}: {_one_line(error)}") from error
    _refuse_missing(model, report, repr(str(path)))
    if rounded is not None:
        if rounded.has_rounding:
            observer().begin_phase("rounding weights")
        saved_weights = (*saved_weights, *quantize_saved(model, rounded, weights, saved_folder, backend))
    loaded = _describe(model, tokenizer, path.stem, kv_format, has_rules)
    return replace(
        loaded,
        source=source,
        file_ranges=weights,
        saved_weights=saved_weights,
        reader_versions=f"{dequantizer_versions()}, {_readers()}",
        eos_token_ids=tuple(dict.fromkeys((*loaded.eos_token_ids, *end_ids(source)))),
    )


def _num_bytes(source: WeightSource | None) -> int:
    """The size of the files that weights are read from; 0 if unknown."""
    return 0 if source is None else sum(path.stat().st_size for path in source.files)


def _readers() -> str:
    return f"readers {readers.VERSION}"


def _refuse_missing(model: PreTrainedModel, report: dict[str, Any], shown: str) -> None:
    """Refuse a model with weights that are missing in its checkpoint; transformers has initialised them at random."""
    if missing := sorted(report["missing_keys"]):
        raise LoadError(
            f"cannot load the model {shown}: its weights lack {len(missing)} tensors of {type(model).__name__}, the "
            f"first {missing[0]}"
        )


def base_model(model: Any, verb: str) -> PreTrainedModel:
    """The transformers model that `model` is or wraps: peft's wrappers have adapters within it.

    *raises:* ArgumentError: it is none, or does more than its base model; the message says what to give instead.
    """
    if isinstance(model, PreTrainedModel):
        return model
    kind = type(model).__name__
    if callable(get_base := getattr(model, "get_base_model", None)) and hasattr(model, "peft_config"):
        configs = model.peft_config.values()
        if any(getattr(config, "is_prompt_learning", False) for config in configs):
            raise ArgumentError(
                f"expected a model whose adapters lie in its layers to {verb}, got a {kind} that puts learned tokens "
                "before each prompt, which Quire does not support; give model.get_base_model() to run without them"
            )
        base = get_base()
        if isinstance(base, PreTrainedModel):
            return base
    if isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
        raise ArgumentError(
            f"expected a transformers model to {verb}, got a {type(inner).__name__} that torch.compile has wrapped; "
            "give the model itself, which is model._orig_mod: Quire's kernels need no compilation"
        )
    raise ArgumentError(f"expected a transformers model to {verb}, got {kind}")


def why_not_dense(model: PreTrainedModel) -> str | None:
    """Why Quire cannot compute with the model's own weights; None if it can.

    Weights of models quantized by transformers are tensors of special classes, or integers with separate scales.
    """
    dense_types = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, PackedParameter)
    for name, tensor in model.named_parameters():
        if type(tensor) in dense_types and tensor.dtype in _FLOATS:
            continue
        quantization = getattr(getattr(model, "config", None), "quantization_config", None)
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        else:
            method = getattr(quantization, "quant_method", None)
        by = str(getattr(method, "value", method) or type(tensor).__module__.partition(".")[0])
        kind = type(tensor).__name__ if type(tensor) not in dense_types else str(tensor.dtype)
        return f"its weights are quantized by {by} ({name} is {kind}), which Quire does not compute with yet"
    return None


def _load_given(source: tuple[Any, ...], kv_format: KVFormat | None, has_rules: bool) -> LoadedModel:
    if len(source) != 2 or not isinstance(source[0], torch.nn.Module):
        raise ArgumentError(
            f"expected (PreTrainedModel, tokenizer or None), got ({', '.join(type(part).__name__ for part in source)})"
        )
    model, tokenizer = base_model(source[0], "run"), source[1]
    if kv_format is not None and kv_format.torch_dtype != model.dtype:
        raise ArgumentError(
            f"expected dtype='auto' or the loaded model's own {model.dtype}, got {kv_format.name}; convert the model "
            "first"
        )
    name = Path(model.config.name_or_path or "").name or model.config.model_type
    return _describe(model, tokenizer, name, kv_format, has_rules)


def _require_element(model_type: str, dtype: str) -> None:
    """*raises:* UnsupportedModelError: keys and values cannot have this dtype of the weights."""
    if dtype not in element_formats():
        raise UnsupportedModelError(
            f"model type {model_type}: expected weights of {', '.join(sorted(element_formats()))}, got {dtype}"
        )


def _describe(
    model: PreTrainedModel, tokenizer: Any, name: str, kv_format: KVFormat | None, has_rules: bool
) -> LoadedModel:
    config = model.config
    text = config.get_text_config(decoder=True)
    model_type = str(text.model_type or config.model_type)
    for parameter, tensor in model.named_parameters():
        if tensor.is_meta:
            raise ArgumentError(
                f"expected a model with its weights in memory, got {parameter} on meta; load them with from_pretrained"
            )
    if (reason := why_not_dense(model)) is not None:
        raise UnsupportedModelError(
            f"model type {model_type}: {reason}; dequantize the model, or use model.generate"
        )
    generation = model.generation_config
    defaults = sampling_defaults(generation, model_type, tokenizer) if has_rules else dict(GREEDY)
    dtype = kv_format.name if kv_format else str(model.dtype).removeprefix("torch.")
    _require_element(model_type, dtype)
    spec = KVSpec.from_config(config, dtype=dtype)
    embeddings = model.get_output_embeddings() or model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    vocab_size = int(weight.shape[0]) if isinstance(weight, torch.Tensor) else spec.vocab_size
    if not vocab_size:
        raise UnsupportedModelError(
            f"model type {model_type}: expected a vocabulary, its config names no vocab_size"
        )
    ignored_inputs = _ignored_inputs(config)
    if ignored_inputs:
        _log.warning(
            "%s (%s) is opened for text: %s not taken yet",
            name, config.model_type, " and ".join(ignored_inputs) + (" are" if ignored_inputs != ("audio",) else " is"),
        )  # fmt: skip
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        name=name,
        model_type=model_type,
        max_model_len=spec.max_model_len or 2**20,  # unlimited positions
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        source=LiveSource(model),
        sampling_defaults=defaults,
        ignored_inputs=ignored_inputs,
    )


def _attention(config: Any) -> dict[str, Any]:
    """Eager attention for models that cap scores: transformers 5.20 would choose sdpa, which drops the cap."""
    caps = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if caps else {}


def _auto_class(config: Any) -> Any:
    """The class that loads the model: for text alone, or for text with other inputs."""
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    for auto_class, types in (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
    ):
        if type(config) in types:
            return auto_class
    raise UnsupportedModelError(
        f"model type {config.model_type}: expected a model that continues text (AutoModelForCausalLM, "
        "AutoModelForImageTextToText), got a type for which transformers has none"
    )


def _ignored_inputs(config: Any) -> tuple[str, ...]:
    """The model's inputs other than text, by the parts of its config and their special tokens."""
    parts = [name for name in type(config).sub_configs if getattr(config, name, None) is not None]
    parts += [name for name, value in config.to_dict().items() if "_token_i" in name and value is not None]
    return tuple(
        kind
        for kind, prefixes in (("images", ("vision", "image", "vq_")), ("audio", ("audio", "speech")))
        if any(name.startswith(prefixes) for name in parts)
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a sequence, from the first of generation config, config and tokenizer that has any."""
    for owner in (model.generation_config, model.config.get_text_config(decoder=True), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


def config_of(source: str | Path | None) -> Any:
    """The argument of `KVSpec.from_config` for a model that `load` would load: its folder, or the config of a GGUF file
    or Hub id.

    *raises:* ArgumentError, LoadError: as `load` does.
    """
    if (file := _gguf_file(source)) is not None:
        gguf_source = GGUFSource(file)
        config = gguf_config(gguf_source)
        config.dtype = gguf_source.dtype
        return config
    where, local = _locate(source)
    if not local and (folder := hub.offline_folder(where)) is not None:
        where, local = str(folder), True
    if local:
        check_config(Path(where))
        return Path(where)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where)
    except Exception as error:  # the Hub client and the parser raise many kinds
        raise LoadError(f"cannot load the config of {where}: {_one_line(error)}") from error


def _gguf_file(source: str | Path | None) -> Path | None:
    """The GGUF file that a source names; None for any other source."""
    if source is None or not str(source):
        return None
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf" and not path.exists():
        raise ArgumentError(f"expected a GGUF file, got {str(source)!r}: there is no such file")
    return path if is_gguf(path) else None


def _locate(source: str | Path | None) -> tuple[str, bool]:
    """(folder or Hub id, whether it is a folder)."""
    if source is None:
        if not (EMBEDDED / "config.json").is_file():
            raise LoadError(
                f"expected the embedded model in {EMBEDDED}, it is not there; name a model instead"
            )
        return str(EMBEDDED), True
    text = str(source)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return str(path), True
    if text and path.exists():
        raise ArgumentError(
            f"expected a model folder, a GGUF file or a Hub id, got the file {text}; give the folder it lies in"
        )
    if isinstance(source, Path) or not hub.is_id(text):
        raise ArgumentError(
            f"expected a model folder, a GGUF file or a Hub id, got {text!r}: there is no such folder"
        )
    return text, False


def _check_folder(folder: Path) -> None:
    """Check a folder, with a clear error, before transformers tries its many ways to load it."""
    check_config(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        if files := sorted(folder.glob("*.gguf")):
            raise LoadError(
                f"expected weights (*.safetensors) in the model folder {folder}, found GGUF; give the file: {files[0]}"
            )
        raise LoadError(f"expected weights (*.safetensors) in the model folder {folder}, found none")


def load_tokenizer(
    source: str | Path | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of a model's folder, GGUF file or Hub id in the local cache; None if it has none.

    source: None for the embedded model. *raises:* LoadError: it cannot be read.
    """
    source = None if source == "embedded" else source
    if (file := _gguf_file(source)) is not None:
        gguf = GGUFSource(file)
        return load_gguf_tokenizer(gguf, gguf_config(gguf))
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": True}
    where, is_local = _locate(source)
    return _load_tokenizer(where, is_local, options, source)


def _load_tokenizer(where: str, local: bool, options: dict[str, Any], source: Any) -> Any:
    """The tokenizer, or None if the checkpoint has none."""
    if local and not any((Path(where) / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except Exception as error:
        raise LoadError(
            f"cannot load the tokenizer of {_source_text(source, where)}: {_one_line(error)}"
        ) from error
    release_copies(tokenizer)
    return tokenizer


def _format(dtype: str | torch.dtype) -> KVFormat | None:
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return None
    if name not in element_formats():
        raise ArgumentError(f"expected dtype auto, {', '.join(sorted(element_formats()))}, got {name!r}")
    return format_of(name)


def _source_text(source: Any, where: str) -> str:
    return "embedded in Quire" if source is None else repr(where)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


@dataclass(frozen=True, eq=False)
class UnloadedModel:
    """The result of `load` as far as config and headers tell it; no weight is read.

    Args:
        model: on torch's meta device: names and shapes of its parameters, no memory.
        spec, name, model_type, max_model_len, vocab_size: as of `LoadedModel`.
        has_experts: whether it is a mixture of experts.
        codes: the form of each parameter that will be quantized, by name.
        is_part: whether it is the language model within a larger one, as of `_text_part`.
        vocabulary: of its tokenizer; None if it has none.
        weight_forms: the forms of the checkpoint's weights, as keys of `support.FORMS`; empty if they are dense.
    """

    model: PreTrainedModel
    spec: KVSpec
    name: str
    model_type: str
    max_model_len: int
    vocab_size: int
    has_experts: bool = False
    codes: dict[str, CodeForm | ExpertForms] = field(default_factory=dict)
    is_part: bool = False
    vocabulary: Vocabulary | None = None
    weight_forms: tuple[str, ...] = ()


def without_weights(
    source: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    is_dense: bool = False,
) -> UnloadedModel:
    """The result of `load` without weights. A Hub id must be in the local cache; a folder needs no weights, unless its
    config says that they are quantized. is_dense: as of `load`.

    Raises:
        ArgumentError, LoadError, ConfigError, UnsupportedModelError: as `load`, as far as config and headers tell.
    """
    kv_format = _format(dtype)
    if (file := _gguf_file(source)) is not None:
        gguf_source = GGUFSource(file)
        config = gguf_config(gguf_source)
        with _as_load_error(f"cannot make a model by the header of {file}"):
            unloaded = _unloaded(config, kv_format.torch_dtype if kv_format else gguf_source.dtype, file.stem)
        kinds = {tensor.saved_type for tensor in gguf_source if isinstance(tensor.saved_type, str)}
        forms = tuple(readers.GGUF + kind for kind in sorted(kinds))
        unloaded = replace(unloaded, vocabulary=gguf_vocabulary(gguf_source), weight_forms=forms)
        return (
            unloaded if is_dense else replace(unloaded, codes=planned_gguf_codes(gguf_source, unloaded.model))
        )
    where, local = _locate(source)
    name = "embedded" if source is None else Path(where).name if local else where
    if not local:
        where = str(hub.cached_folder(where, revision))
    check_config(Path(where))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(where, **options)
    except Exception as error:  # transformers and the Hub client raise many kinds
        raise LoadError(
            f"cannot read the config of {_source_text(source, where)}: {_one_line(error)}"
        ) from error
    header = open_weights(config, where)
    tensors = [] if header is None else list(header)  # a damaged header is refused here
    is_quantized = quantization_of(config) is not None
    saved_dtype = _dtype_of(config) or (torch.bfloat16 if is_quantized else None)
    if saved_dtype is None:
        saved_dtype = next(
            (tensor.saved_type for tensor in tensors if tensor.saved_type in _FLOATS), torch.float32
        )
    with _as_load_error(f"cannot make a model by the config of {_source_text(source, where)}"):
        unloaded = _unloaded(
            dense_config(config) if is_quantized else config,
            kv_format.torch_dtype if kv_format else saved_dtype,
            name,
            trust_remote_code=trust_remote_code,
        )
    unloaded = replace(unloaded, vocabulary=planned_vocabulary(where, None, unloaded.vocab_size))
    if not is_quantized:
        return unloaded
    names = _NAMES_OF_TEXT if unloaded.is_part else None
    codes = planned_codes(unloaded.model, where, header, config, names)
    unloaded = replace(unloaded, weight_forms=(readers.method_of(quantization_of(config) or {}),))
    return unloaded if is_dense else replace(unloaded, codes=codes)


@contextmanager
def _as_load_error(failure: str) -> Iterator[None]:
    """*raises:* LoadError: `failure`, for any error but Quire's own; transformers and torch raise many kinds."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        raise LoadError(f"{failure}: {_one_line(error)}") from error


def _unloaded(config: Any, dtype: Any, name: str, **options: Any) -> UnloadedModel:
    kind = _auto_class(config)
    options |= {"dtype": dtype, **_attention(config)}
    model: Any
    is_part = False
    with torch.device("meta"):
        try:
            model = kind.from_config(config, **options)
        except ImportError as error:  # as `_text_part`
            config, is_part = _language_config(config, error), True
            model = AutoModelForCausalLM.from_config(config, **options)
    dtype_name = str(dtype).removeprefix("torch.")
    _require_element(config.model_type, dtype_name)
    spec = KVSpec.from_config(config, dtype=dtype_name)
    embeddings = model.get_output_embeddings() or model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    return UnloadedModel(
        model=model,
        spec=spec,
        name=name,
        model_type=str(config.get_text_config(decoder=True).model_type or config.model_type),
        max_model_len=spec.max_model_len or 2**20,
        vocab_size=int(weight.shape[0]) if isinstance(weight, torch.Tensor) else spec.vocab_size or 0,
        has_experts=any(is_experts(module) for module in model.modules()),
        is_part=is_part,
    )
