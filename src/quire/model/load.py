"""A model and its tokenizer, from wherever they are: the embedded one, a folder, a GGUF file, the Hub, or loaded.

Not a preparation: the model comes as transformers loads it, and `prepare` changes it.
Every failure is one line that says what was given and what is wrong: a path that does not exist never becomes a
question to the network, weights that are cut off or incomplete never become a model.

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
from quire.model.checkpoint_files import refuse_adapter, weights_of
from quire.model.config_file import check_config
from quire.model.experts import is_experts
from quire.model.file_ranges import FileRanges, MappedFiles
from quire.model.generation_config import GREEDY, sampling_defaults
from quire.model.load_gguf import (
    end_ids,
    gguf_config,
    load_gguf_model,
    load_gguf_tokenizer,
    planned_gguf_codes,
)
from quire.model.load_quantized import (
    load_quantized,
    plain_config,
    planned_codes,
    quantization_of,
    refuse_other_shapes,
)
from quire.model.packed_parameter import PackedParameter
from quire.model.quantized_experts import ExpertForms
from quire.model.saved_codes import quantize_saved
from quire.model.saved_weights import SavedWeights
from quire.model.sources import (
    GGUFSource,
    LiveSource,
    SafetensorsSource,
    WeightSource,
    dequantizer_versions,
    is_gguf,
)
from quire.model.support import GGUF
from quire.model.tokenizer import (
    TOKENIZER_FILES,
    Vocabulary,
    gguf_vocabulary,
    planned_vocabulary,
    release_copies,
)
from quire.model.transformers_progress import without_progress_bars
from quire.quantized import CodeForm, readers
from quire.saved_folder import SavedFolder
from quire.spec import KVFormat, KVSpec, element_formats, format_of
from quire.spec.weight_formats import WeightFormats

__all__ = ["EMBEDDED", "LoadedModel", "UnloadedModel", "load", "without_weights"]

EMBEDDED = Path(__file__).parent / "embedded"

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_log = logging.getLogger("quire")
# Of a language model's tensors within a larger model, and when it is alone.
_NAMES_OF_TEXT = {r"^model\.language_model\.": "model.", r"^language_model\.model\.": "model."}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model as transformers gives it, with what an engine needs to know about it.

    Args:
        model: on the CPU, in the mode (training or not) that it came in.
        tokenizer: None where there is none: then prompts are token ids.
        spec: its KV shape, in the dtype it computes in.
        name: what to call it: name of its folder or file, Hub id, "embedded".
        model_type: of its config, for messages.
        max_model_len: longest sequence its positions allow.
        vocab_size: ids are below it; the width of its logits.
        eos_token_ids: any of them ends a sequence.
        sampling_defaults: what its generation config says of requests that say nothing (`generation_config`).
        source: its weights as they were stored before they became tensors of `model`.
        mapped: where its tensors lie in files, or which of a file's they follow from; None for a model that somebody
            else loaded.
        kept: the files that weights are read from in the form that they are held in, as codes.
        not_taken: what the model was made for beside text and is not given here: "images", "audio".
        reckoned_by: where weights follow from codes in the source's files, the versions that say how; else "".
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
    mapped: FileRanges | None = None
    kept: tuple[SavedWeights, ...] = ()
    not_taken: tuple[str, ...] = ()
    dequantizer_versions: str = ""

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
    widened: bool = False,
    keep: SavedFolder | None = None,
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
        weights: how its weights are rounded to codes, those of a quantized checkpoint after they were widened; None:
            they stay as they are, in the codes of the checkpoint where it has some.
        widened: no codes are kept of a quantized checkpoint, nor where `weights` is given.
        keep: a folder that keeps codes from one start to the next (`saved_codes`).
        backend: what will run it, and computes from codes, as of `quire.backends.extension`.
        generation_config: "auto" for the model's own; "none": of it only the end tokens are read.

    Raises:
        ArgumentError: an argument of the wrong form, or no such folder.
        LoadError: files missing or broken, or no such model.
        ConfigError, UnsupportedModelError: its config cannot be understood or served.
    """
    wanted, widened = _format(dtype), widened or weights is not None
    has_rules = generation_config != "none"
    if isinstance(source, tuple):
        if weights is not None:
            raise ArgumentError(
                "expected a checkpoint whose weights can be rounded as it is loaded, got a model that is loaded "
                "already; give its folder or Hub id - in `weights`"
            )
        return _given(source, wanted, has_rules)
    if source is not None and not isinstance(source, (str, Path)):
        raise ArgumentError(
            "expected a model as None, folder, GGUF file, Hub id or (model, tokenizer), got "
            f"{type(source).__name__}"
        )
    if (file := _gguf_file(source)) is not None:
        return _load_gguf(file, wanted, weights, widened, keep, backend, has_rules)
    where, local = _locate(source)
    name = "embedded" if source is None else Path(where).name if local else where
    if not local and (folder := hub.folder_instead(where, revision)) is not None:
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
        stored = weights_of(config, where, None if local else revision, may_download=not local)
        observer().begins("reading weights", _num_bytes(stored))
        # First: it takes a multiple of the vocabulary while it is made, and then the weights are not there yet.
        tokenizer = _load_tokenizer(where, local, options, source)
        read = _from_pretrained(where, config, stored, widened, weights, keep, backend)
        loading = {"dtype": wanted.torch_dtype if wanted else "auto", "output_loading_info": True}
        loading |= {**options, **_attention(config)}
        loaded: Any
        try:
            loaded = read(_auto_class(config), **loading)
        except ImportError as error:  # a library for images or sound, which text needs nothing of
            loaded = _text_part(where, config, loading, error, read)
        model, report, kept = loaded
    except (UnsupportedModelError, LoadError, ArgumentError):
        raise
    except Exception as error:  # transformers, safetensors and the Hub client raise many kinds
        if "config.json" in str(error) and not local:
            refuse_adapter(where, revision, may_download=True)
        broken = "a safetensors file is broken or cut short: " if isinstance(error, SafetensorError) else ""
        raise LoadError(
            f"cannot load the model {_shown(source, where)}: {broken}{_one_line(error)}"
        ) from error
    _refuse_missing(model, report, _shown(source, where))
    mapped = MappedFiles()
    if weights is not None:
        if weights.has_rounding:
            observer().begins("rounding weights")
        kept = (*kept, *quantize_saved(model, weights, mapped, keep, backend))
    loaded_model = _describe(model, tokenizer, name, wanted, has_rules)
    return replace(
        loaded_model,
        source=stored or loaded_model.source,
        mapped=mapped,
        kept=kept,
        dequantizer_versions="" if quantization_of(config) is None else _readers(),
    )


def _from_pretrained(
    where: str,
    config: Any,
    source: SafetensorsSource | None,
    widened: bool,
    rounded: WeightFormats | None,
    keep: SavedFolder | None,
    backend: str | None,
) -> Callable[..., Any]:
    """What makes (model, report, files of kept codes) of a class and options: transformers, or Quire where weights are
    quantized, and where experts are rounded before they are stacked.

    widened: of quantized weights no codes are kept.
    """
    rounds_experts = rounded is not None and rounded.has_rounding and _may_have_experts(config)
    is_quantized = quantization_of(config) is not None
    if not is_quantized and (source is None or not rounds_experts):

        def read_plain(kind: Any, **options: Any) -> Any:
            model, report = kind.from_pretrained(where, ignore_mismatched_sizes=True, **options)
            refuse_other_shapes(report, where)
            return model, report, ()

        return read_plain

    def read(kind: Any, **options: Any) -> Any:
        whole = options.pop("config", config)
        dtype = options.pop("dtype")
        if dtype == "auto":
            dtype = _dtype_of(whole)
        if dtype is None:
            stored = [] if is_quantized or source is None else [one.saved_type for one in source]
            dtype = next((one for one in stored if one in _FLOATS), torch.bfloat16)
        how: dict[str, Any] = {"widened": widened, "rounded": rounded, "keep": keep, "backend": backend}
        return load_quantized(kind, where, source, whole, dtype, **how, **options)

    return read


def _may_have_experts(config: Any) -> bool:
    """By the names that configs have for their number: only memory depends on it."""
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _dtype_of(config: Any) -> torch.dtype | None:
    """What a config says that its model computes in."""
    said = config.dtype or config.get_text_config(decoder=True).dtype
    return getattr(torch, said) if isinstance(said, str) else said


def _language_config(config: Any, error: ImportError) -> Any:
    """That of its language model alone. *raises:* `error`: transformers has no model of it."""
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise error
    if getattr(config, "tie_word_embeddings", None) is not None:
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def _text_part(
    where: str, config: Any, loading: dict[str, Any], error: ImportError, read: Callable[..., Any]
) -> Any:
    """What `read` gives, of the language model within a checkpoint whose other parts want a library that is not here.

    *raises:* the error, where transformers has no model of this text alone.
    """
    text = _language_config(config, error)
    text.dtype = text.dtype or config.dtype
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    if (quantization := quantization_of(config)) is not None:
        text.quantization_config = quantization
    loaded = read(kind, config=text, key_mapping=_NAMES_OF_TEXT, **loading)
    _log.warning("%s: its language model alone is loaded: %s", where, _one_line(error))
    return loaded


def _load_gguf(
    path: Path,
    wanted: KVFormat | None,
    rounded: WeightFormats | None,
    widened: bool,
    keep: SavedFolder | None,
    backend: str | None,
    has_rules: bool,
) -> LoadedModel:
    source = GGUFSource(path)
    try:
        dtype = wanted.torch_dtype if wanted else source.dtype
        # First: it takes a multiple of the vocabulary while it is made, and then the weights are not there yet.
        tokenizer = load_gguf_tokenizer(source, gguf_config(source))
        give_back_freed()
        observer().begins("reading weights", _num_bytes(source))
        model, report, weights, kept = load_gguf_model(
            source, dtype, widened=widened, rounded=rounded, keep=keep, backend=backend
        )
    except (LoadError, ArgumentError):
        raise
    except Exception as error:  # transformers, gguf and tokenizers raise many kinds
        raise LoadError(f"cannot load the model {str(path)!r}: {_one_line(error)}") from error
    _refuse_missing(model, report, repr(str(path)))
    if rounded is not None:
        if rounded.has_rounding:
            observer().begins("rounding weights")
        kept = (*kept, *quantize_saved(model, rounded, weights, keep, backend))
    loaded = _describe(model, tokenizer, path.stem, wanted, has_rules)
    return replace(
        loaded,
        source=source,
        mapped=weights,
        kept=kept,
        dequantizer_versions=f"{dequantizer_versions()}, {_readers()}",
        eos_token_ids=tuple(dict.fromkeys((*loaded.eos_token_ids, *end_ids(source)))),
    )


def _num_bytes(source: WeightSource | None) -> int:
    """Of the files that weights are read from; 0 where that is not known."""
    return 0 if source is None else sum(path.stat().st_size for path in source.files)


def _readers() -> str:
    return f"readers {readers.VERSION}"


def _refuse_missing(model: PreTrainedModel, report: dict[str, Any], shown: str) -> None:
    """Refuse a model some of whose weights were not in its checkpoint; transformers has made them up."""
    if missing := sorted(report["missing_keys"]):
        raise LoadError(
            f"cannot load the model {shown}: its weights lack {len(missing)} tensors of {type(model).__name__}, the "
            f"first {missing[0]}"
        )


def base_model(model: Any, verb: str) -> PreTrainedModel:
    """The transformers model that `model` is, or is a wrapper of: peft's, whose adapters lie in it.

    *raises:* ArgumentError: it is none, or does something beside its base model; says what to give instead.
    """
    if isinstance(model, PreTrainedModel):
        return model
    kind = type(model).__name__
    if callable(get_base := getattr(model, "get_base_model", None)) and hasattr(model, "peft_config"):
        configs = model.peft_config.values()
        if any(getattr(config, "is_prompt_learning", False) for config in configs):
            raise ArgumentError(
                f"expected a model whose adapters lie in its layers to {verb}, got a {kind} that puts learned tokens "
                "before each prompt, which Quire does not do; give model.get_base_model() to go without them"
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


def not_plain(model: PreTrainedModel) -> str | None:
    """Why Quire cannot compute with the model's weights themselves, in words; None where it can.

    Weights of quantized models are tensors of classes of their own, or integers beside their scales.
    """
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, PackedParameter)
    for name, tensor in model.named_parameters():
        if type(tensor) in plain and tensor.dtype in _FLOATS:
            continue
        quantization = getattr(getattr(model, "config", None), "quantization_config", None)
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        else:
            method = getattr(quantization, "quant_method", None)
        by = str(getattr(method, "value", method) or type(tensor).__module__.partition(".")[0])
        kind = type(tensor).__name__ if type(tensor) not in plain else str(tensor.dtype)
        return f"its weights are quantized by {by} ({name} is {kind}), which Quire does not compute with yet"
    return None


def _given(source: tuple[Any, ...], wanted: KVFormat | None, has_rules: bool) -> LoadedModel:
    if len(source) != 2 or not isinstance(source[0], torch.nn.Module):
        raise ArgumentError(
            f"expected (PreTrainedModel, tokenizer or None), got ({', '.join(type(part).__name__ for part in source)})"
        )
    model, tokenizer = base_model(source[0], "run"), source[1]
    if wanted is not None and wanted.torch_dtype != model.dtype:
        raise ArgumentError(
            f"expected dtype='auto' or the loaded model's own {model.dtype}, got {wanted.name}; convert the model first"
        )
    name = Path(model.config.name_or_path or "").name or model.config.model_type
    return _describe(model, tokenizer, name, wanted, has_rules)


def _require_element(model_type: str, dtype: str) -> None:
    """*raises:* UnsupportedModelError: a type of weights that keys and values cannot have."""
    if dtype not in element_formats():
        raise UnsupportedModelError(
            f"model type {model_type}: expected weights of {', '.join(sorted(element_formats()))}, got {dtype}"
        )


def _describe(
    model: PreTrainedModel, tokenizer: Any, name: str, wanted: KVFormat | None, has_rules: bool
) -> LoadedModel:
    config = model.config
    text = config.get_text_config(decoder=True)
    model_type = str(text.model_type or config.model_type)
    for parameter, tensor in model.named_parameters():
        if tensor.device.type != "cpu":
            raise ArgumentError(
                f"expected a model on the CPU, got {parameter} on {tensor.device}; Quire runs on the CPU for now, move "
                "it with model.to('cpu')"
            )
    if (reason := not_plain(model)) is not None:
        raise UnsupportedModelError(
            f"model type {model_type}: {reason}; dequantize the model, or use model.generate"
        )
    generation = model.generation_config
    defaults = sampling_defaults(generation, model_type, tokenizer) if has_rules else dict(GREEDY)
    dtype = wanted.name if wanted else str(model.dtype).removeprefix("torch.")
    _require_element(model_type, dtype)
    spec = KVSpec.from_config(config, dtype=dtype)
    embeddings = model.get_output_embeddings() or model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    vocab_size = int(weight.shape[0]) if isinstance(weight, torch.Tensor) else spec.vocab_size
    if not vocab_size:
        raise UnsupportedModelError(
            f"model type {model_type}: expected a vocabulary, its config names no vocab_size"
        )
    not_taken = _not_taken(config)
    if not_taken:
        _log.warning(
            "%s (%s) is opened for text: %s not taken yet",
            name, config.model_type, " and ".join(not_taken) + (" are" if not_taken != ("audio",) else " is"),
        )  # fmt: skip
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        name=name,
        model_type=model_type,
        max_model_len=spec.max_model_len or 2**20,  # no positions to run out of
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        source=LiveSource(model),
        sampling_defaults=defaults,
        not_taken=not_taken,
    )


def _attention(config: Any) -> dict[str, Any]:
    """Eager for models that cap attention's scores: transformers 5.20 would choose sdpa, which drops the cap there."""
    caps = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if caps else {}


def _auto_class(config: Any) -> Any:
    """The class that loads the model: one that takes text alone, or one that takes text beside something else."""
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
        "AutoModelForImageTextToText), transformers has none of this type"
    )


def _not_taken(config: Any) -> tuple[str, ...]:
    """What a model takes beside text, by the parts of its config and the tokens it has for them."""
    said = [name for name in type(config).sub_configs if getattr(config, name, None) is not None]
    said += [name for name, value in config.to_dict().items() if "_token_i" in name and value is not None]
    return tuple(
        what
        for what, names in (("images", ("vision", "image", "vq_")), ("audio", ("audio", "speech")))
        if any(name.startswith(names) for name in said)
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a sequence, of the first of generation config, config and tokenizer that names any."""
    for owner in (model.generation_config, model.config.get_text_config(decoder=True), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


def config_of(source: str | Path | None) -> Any:
    """What `KVSpec.from_config` reads of a model that `load` would load: its folder, or a file's or Hub id's config.

    *raises:* ArgumentError, LoadError: as `load` does.
    """
    if (file := _gguf_file(source)) is not None:
        stored = GGUFSource(file)
        config = gguf_config(stored)
        config.dtype = stored.dtype
        return config
    where, local = _locate(source)
    if not local and (folder := hub.folder_instead(where)) is not None:
        where, local = str(folder), True
    if local:
        check_config(Path(where))
        return Path(where)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where)
    except Exception as error:  # the Hub's and the file's many kinds
        raise LoadError(f"cannot load the config of {where}: {_one_line(error)}") from error


def _gguf_file(source: str | Path | None) -> Path | None:
    """The GGUF file that a source names; None where it names something else."""
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
    """A clear line for what is wrong with a folder, before transformers tries its many ways to load it."""
    check_config(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        if files := sorted(folder.glob("*.gguf")):
            raise LoadError(
                f"expected weights (*.safetensors) in the model folder {folder}, found GGUF; give the file: {files[0]}"
            )
        raise LoadError(f"expected weights (*.safetensors) in the model folder {folder}, found none")


def _load_tokenizer(where: str, local: bool, options: dict[str, Any], source: Any) -> Any:
    """The tokenizer, or None where the checkpoint has none."""
    if local and not any((Path(where) / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except Exception as error:
        raise LoadError(
            f"cannot load the tokenizer of {_shown(source, where)}: {_one_line(error)}"
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


def _shown(source: Any, where: str) -> str:
    return "embedded in Quire" if source is None else repr(where)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


@dataclass(frozen=True, eq=False)
class UnloadedModel:
    """A model as `load` would give it, from its config and the headers of its files; no weight is read.

    Args:
        model: on torch's meta device: names and shapes of its parameters, no memory.
        spec, name, model_type, max_model_len, vocab_size: as of `LoadedModel`.
        has_experts: whether it is a mixture of experts.
        codes: the form of those parameters that will be held as codes, by name.
        is_part: whether it is the language model within a larger one, as of `_text_part`.
        vocabulary: of its tokenizer; None where it has none.
        stored_forms: what its files say of their weights, as `support.FORMS` has it; empty where they are plain.
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
    stored_forms: tuple[str, ...] = ()


def without_weights(
    source: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    widened: bool = False,
) -> UnloadedModel:
    """What `load` would give, its weights left out. A Hub id must be in the local cache; a folder need have no weights,
    unless its config says that they are quantized. widened: as of `load`.

    Raises:
        ArgumentError, LoadError, ConfigError, UnsupportedModelError: as `load`, as far as config and headers tell.
    """
    wanted = _format(dtype)
    if (file := _gguf_file(source)) is not None:
        stored = GGUFSource(file)
        config = gguf_config(stored)
        with _as_load_error(f"cannot make a model by the header of {file}"):
            found = _unloaded(config, wanted.torch_dtype if wanted else stored.dtype, file.stem)
        kinds = {tensor.saved_type for tensor in stored if isinstance(tensor.saved_type, str)}
        forms = tuple(GGUF + kind for kind in sorted(kinds))
        found = replace(found, vocabulary=gguf_vocabulary(stored), stored_forms=forms)
        return found if widened else replace(found, codes=planned_gguf_codes(stored, found.model))
    where, local = _locate(source)
    name = "embedded" if source is None else Path(where).name if local else where
    if not local:
        where = str(hub.cached_folder(where, revision))
    check_config(Path(where))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(where, **options)
    except Exception as error:  # transformers and the Hub client raise many kinds
        raise LoadError(f"cannot read the config of {_shown(source, where)}: {_one_line(error)}") from error
    header = weights_of(config, where)
    tensors = [] if header is None else list(header)  # a damaged one is said here
    is_plain = quantization_of(config) is None
    stored_dtype = _dtype_of(config) or (None if is_plain else torch.bfloat16)
    if stored_dtype is None:
        stored_dtype = next((one.saved_type for one in tensors if one.saved_type in _FLOATS), torch.float32)
    with _as_load_error(f"cannot make a model by the config of {_shown(source, where)}"):
        found = _unloaded(
            config if is_plain else plain_config(config),
            wanted.torch_dtype if wanted else stored_dtype,
            name,
            trust_remote_code=trust_remote_code,
        )
    found = replace(found, vocabulary=planned_vocabulary(where, None, found.vocab_size))
    if is_plain:
        return found
    names = _NAMES_OF_TEXT if found.is_part else None
    codes = planned_codes(found.model, where, header, config, names)
    found = replace(found, stored_forms=(readers.method_of(quantization_of(config) or {}),))
    return found if widened else replace(found, codes=codes)


@contextmanager
def _as_load_error(what: str) -> Iterator[None]:
    """*raises:* LoadError: any error but Quire's own; transformers and torch raise many kinds."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        raise LoadError(f"{what}: {_one_line(error)}") from error


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
