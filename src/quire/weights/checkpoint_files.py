"""Files next to a checkpoint's config.json that describe its weights: settings of early tools, and adapters.

    quantize_config.json    AutoGPTQ's, from before config.json had a quantization_config: read as one, of GPTQ
    quant_config.json       AutoAWQ's, likewise: of AWQ
    hf_quant_config.json    ModelOpt's: refused
    adapter_config.json     PEFT's, of an adapter for a separate model: refused, with what to do

Quantized weights that neither config.json nor one of these files describes are refused: transformers would take the
codes for values.

Cost: headers of the weights' files.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from quire.errors import LoadError
from quire.weights.codes.readers import first_quantized_tensor
from quire.weights.load_quantized import quantization_of
from quire.weights.sources import SafetensorsSource, checkpoint_file

__all__ = ["open_weights", "read_json_object", "refuse_adapter"]

_SETTINGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_log = logging.getLogger("quire")


def open_weights(
    config: Any, where: str, revision: str | None = None, *, may_download: bool = False
) -> SafetensorsSource | None:
    """The weights of the folder or Hub id `where`; None if they are not safetensors files. If `config` does not
    describe its quantized weights, it gets the settings of the files next to it.

    *raises:* LoadError: a file is broken, or codes are described by no file.
    """
    source = SafetensorsSource.of_checkpoint(where, revision, may_download=may_download)
    if quantization_of(config) is not None:
        return source
    codes = None if source is None else first_quantized_tensor({tensor.name: tensor for tensor in source})
    if source is not None and codes is None:
        return source
    for name, method in _SETTINGS.items():
        path = checkpoint_file(where, name, revision, may_download=may_download)
        if path is None:
            continue
        settings = read_json_object(path)
        is_gemm = str(settings.get("version")).lower() == "gemm"
        settings = {"quant_method": "awq" if is_gemm else method, **settings}
        if source is None:
            others = _names(settings, Path(where))
            source = SafetensorsSource.of_checkpoint(
                where, revision, may_download=may_download, other_names=others
            )
            if source is None:
                raise LoadError(
                    f"expected the weights that {path} describes in model.safetensors or "
                    f"{', '.join(others)}.safetensors, {where} has none of them"
                )
        _log.warning("%s: its quantization_config is read from %s", where, name)
        config.quantization_config = settings
        return source
    if codes is not None:
        modelopt = checkpoint_file(where, "hf_quant_config.json", revision, may_download=may_download)
        hint = f"; {modelopt} describes it in ModelOpt's format, which is not read" if modelopt else ""
        raise LoadError(
            f"expected a quantization_config in config.json of {where}, which has {codes} of a quantized weight, got "
            f"none{hint}; take another checkpoint of the model that says how its weights are quantized, or one in "
            "16 bits"
        )
    return None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file. *raises:* LoadError: the file is broken, or holds no object."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {path}: {error}") from error
    if not isinstance(settings, dict):
        raise LoadError(f"cannot read {path}: expected an object of fields, got {type(settings).__name__}")
    return settings


def _names(settings: dict[str, Any], folder: Path) -> list[str]:
    """Names that the weights' file may have: the one in the settings, AutoGPTQ's, or that of the only file."""
    stem = settings.get("model_file_base_name")
    names = [stem] if isinstance(stem, str) and stem and Path(stem).name == stem else []
    names.append(f"gptq_model-{settings.get('bits')}bit-{settings.get('group_size')}g")
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return names + ([files[0].stem] if len(files) == 1 else [])


def refuse_adapter(where: str, revision: str | None = None, *, may_download: bool = False) -> None:
    """*raises:* LoadError: `where` has an adapter, alone or next to a model. The message names the adapter and its base
    model."""
    path = checkpoint_file(where, "adapter_config.json", revision, may_download=may_download)
    if path is None:
        return
    settings = read_json_object(path)
    base, kind = settings.get("base_model_name_or_path"), settings.get("peft_type") or "PEFT"
    missing = " (there is no such folder)" if _is_missing_path(base) else ""
    over = f"the model {base!r}{missing}" if base else "a model that its adapter_config.json does not name"
    has_config = checkpoint_file(where, "config.json", revision, may_download=may_download) is not None
    alone = "; or remove adapter_config.json to serve the model next to it without the adapter" * has_config
    raise LoadError(
        f"expected a whole model, {where} has a {kind} adapter over {over}; merge the two and serve the folder that is "
        f"saved: PeftModel.from_pretrained(base, {where!r}).merge_and_unload().save_pretrained(folder), and its "
        f"tokenizer{alone}"
    )


def _is_missing_path(base: Any) -> bool:
    """Whether `base` is a path, not a Hub id, and does not exist."""
    is_path = isinstance(base, str) and (base.startswith(("/", ".", "~")) or base.count("/") > 1)
    return is_path and not Path(base).expanduser().exists()
