"""A model and its tokenizer, from wherever they are: the embedded one, a folder, the Hub, or loaded already.

Not a preparation: the model comes as transformers loads it, and `prepare` changes it.
Every failure is one line that says what was given and what is wrong: a path that does not exist never becomes a
question to the network, weights that are cut off or incomplete never become a model.

Cost: reading the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from quire.errors import ArgumentError, LoadError, UnsupportedModelError
from quire.model.mapped_weights import MappedWeights
from quire.model.shell import making_shells
from quire.spec import DTYPE_BYTES, KVSpec
from quire.spec.config import spec_of

__all__ = ["EMBEDDED", "LoadedModel", "load"]

EMBEDDED = Path(__file__).parent / "embedded"

# What a model's generation_config.json may set as sampling defaults.
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model as transformers gives it, with what an engine needs to know about it.

    Args:
        model: in eval mode, on the CPU.
        tokenizer: None where there is none: then prompts are token ids.
        spec: its KV shape, in the dtype it computes in.
        name: what to call it: folder name, Hub id, "embedded".
        model_type: of its config, for messages.
        max_model_len: longest sequence its positions allow.
        vocab_size: ids are below it; the width of its logits.
        eos_token_ids: any of them ends a sequence.
        sampling_defaults: from its generation_config: temperature (0 where it does not sample), top_p, top_k, ...
        mapped: the files its tensors may lie in; None for a model that somebody else loaded.
    """

    model: PreTrainedModel
    tokenizer: Any
    spec: KVSpec
    name: str
    model_type: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)
    mapped: MappedWeights | None = None

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.spec.dtype)


def load(
    source: str | Path | tuple[PreTrainedModel, Any] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model for causal language modelling.

    Args:
        source: None for the embedded model, a folder, a Hub id, or (model, tokenizer or None).
        dtype: "auto" for the checkpoint's own, or "float32", "bfloat16", "float16".
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: whether code of the checkpoint may run.

    Raises:
        ArgumentError: an argument of the wrong form, or no such folder.
        LoadError: files missing or broken, or no such model.
        ConfigError, UnsupportedModelError: its config cannot be understood or served.
    """
    wanted = _dtype(dtype)
    if isinstance(source, tuple):
        return _given(source, wanted)
    if source is not None and not isinstance(source, (str, Path)):
        raise ArgumentError(
            f"expected a model as None, folder, Hub id or (model, tokenizer), got {type(source).__name__}"
        )
    where, local = _locate(source)
    if local:
        _check_folder(Path(where))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if local:
        options["local_files_only"] = True
    elif revision is not None:
        options["revision"] = revision
    with _quiet(), making_shells():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                where, dtype=wanted or "auto", output_loading_info=True, **options
            )
            model, report = loaded
        except Exception as error:  # transformers, safetensors and the Hub client raise many kinds
            broken = (
                "a safetensors file is broken or cut short: " if isinstance(error, SafetensorError) else ""
            )
            raise LoadError(
                f"cannot load the model {_shown(source, where)}: {broken}{_one_line(error)}"
            ) from error
        tokenizer = _load_tokenizer(where, local, options, source)
    missing = sorted(report["missing_keys"])
    if missing:
        raise LoadError(
            f"cannot load the model {_shown(source, where)}: its weights lack {len(missing)} tensors of "
            f"{type(model).__name__}, the first {missing[0]}"
        )
    name = "embedded" if source is None else Path(where).name if local else where
    return replace(_describe(model, tokenizer, name), mapped=MappedWeights())


def _given(source: tuple[Any, ...], wanted: torch.dtype | None) -> LoadedModel:
    if len(source) != 2 or not isinstance(source[0], PreTrainedModel):
        raise ArgumentError(
            f"expected (PreTrainedModel, tokenizer or None), got ({', '.join(type(part).__name__ for part in source)})"
        )
    model, tokenizer = source
    if wanted is not None and wanted != model.dtype:
        raise ArgumentError(
            f"expected dtype='auto' or the loaded model's own {model.dtype}, got {wanted}; convert the model first"
        )
    name = Path(model.config.name_or_path).name or model.config.model_type
    return _describe(model, tokenizer, name)


def _describe(model: PreTrainedModel, tokenizer: Any, name: str) -> LoadedModel:
    config = model.config
    text = config.get_text_config(decoder=True)
    model_type = str(text.model_type or config.model_type)
    for parameter, tensor in model.named_parameters():
        if tensor.device.type != "cpu":
            raise ArgumentError(
                f"expected a model on the CPU, got {parameter} on {tensor.device}; Quire runs on the CPU for now, move "
                "it with model.to('cpu')"
            )
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(
            f"model type {model_type}: expected weights of {', '.join(sorted(DTYPE_BYTES))}, got {dtype}"
        )
    spec = spec_of(config, dtype=dtype)
    embeddings = model.get_output_embeddings() or model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    vocab_size = int(weight.shape[0]) if isinstance(weight, torch.Tensor) else spec.vocab_size
    if not vocab_size:
        raise UnsupportedModelError(
            f"model type {model_type}: expected a vocabulary, its config names no vocab_size"
        )
    model.eval()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        name=name,
        model_type=model_type,
        max_model_len=spec.max_model_len or 2**20,  # no positions to run out of
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        sampling_defaults=_sampling_defaults(model),
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a sequence, of the first of generation config, config and tokenizer that names any."""
    for owner in (model.generation_config, model.config.get_text_config(decoder=True), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


def _sampling_defaults(model: PreTrainedModel) -> dict[str, float | int]:
    config = model.generation_config
    if config is None:
        return {}
    defaults = {
        name: value for name in _SAMPLING_FIELDS if (value := getattr(config, name, None)) is not None
    }
    if not config.do_sample:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            defaults.pop(name, None)
        defaults["temperature"] = 0.0
    return defaults


def config_of(source: str | Path | None) -> Any:
    """What `KVSpec.from_config` reads of a model that `load` would load: its folder, or a Hub id's config.

    *raises:* ArgumentError, LoadError: as `load` does.
    """
    where, local = _locate(source)
    if local:
        return Path(where)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where)
    except Exception as error:  # the Hub's and the file's many kinds
        raise LoadError(f"cannot load the config of {where}: {_one_line(error)}") from error


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
            f"expected a model folder or a Hub id, got the file {text}; give the folder it lies in"
        )
    if isinstance(source, Path) or not _HUB_ID.fullmatch(text):
        raise ArgumentError(f"expected a model folder or a Hub id, got {text!r}: there is no such folder")
    return text, False


def _check_folder(folder: Path) -> None:
    """A clear line for what is wrong with a folder, before transformers tries its many ways to load it."""
    if not (folder / "config.json").is_file():
        raise LoadError(f"expected a model folder, {folder} has no config.json")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {folder / 'config.json'}: {_one_line(error)}") from error
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise LoadError(f"expected weights (*.safetensors) in the model folder {folder}, found none")


def _load_tokenizer(where: str, local: bool, options: dict[str, Any], source: Any) -> Any:
    """The tokenizer, or None where the checkpoint has none."""
    if local and not any(
        (Path(where) / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    ):
        return None
    try:
        return AutoTokenizer.from_pretrained(where, **options)
    except Exception as error:
        raise LoadError(
            f"cannot load the tokenizer of {_shown(source, where)}: {_one_line(error)}"
        ) from error


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return None
    if name not in DTYPE_BYTES:
        raise ArgumentError(f"expected dtype auto, {', '.join(sorted(DTYPE_BYTES))}, got {name!r}")
    return getattr(torch, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers and its Hub client without progress bars and warnings; as they were afterwards. A Hub that cannot
    be reached is tried several times, and what failed is in the error."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _shown(source: Any, where: str) -> str:
    return "embedded in Quire" if source is None else repr(where)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
