"""A model and its tokenizer out of one GGUF file, its weights widened to a type torch computes in.

transformers knows which architecture of a GGUF file is which of its models, how the tensors are called there, and what
the file's writer did to them; here they only pass through one at a time. Its own way (`gguf_file=`) reads the whole
vocabulary three times and holds the largest tensor in float32 three times: 50 s and 3.1 GB for Gemma 3 270M.
Where transformers itself reads a file lazily (its newer architectures) its way is taken.
Not a loader of quantized models: codes do not outlive loading.

Cost: the model in `dtype`, and while it is loaded once more its largest tensor in float32.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import __version__ as transformers_version

from quire.errors import LoadError
from quire.model.mapped_weights import Origin
from quire.model.sources import GGUFSource, reckoned_by, widen

__all__ = ["WidenedWeights", "end_ids", "gguf_config", "load_gguf_model", "load_gguf_tokenizer"]

_log = logging.getLogger("quire")


class WidenedWeights:
    """Which tensor of a GGUF file each weight of a model was widened from, for `packed_weights`.

    The counterpart of `MappedWeights` for weights that are no bytes of a file but follow from some.
    """

    def __init__(self, source: GGUFSource) -> None:
        status = source.path.stat()
        self._path = str(source.path.resolve())
        self._stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        self._offsets: dict[tuple[int, torch.Size], int] = {}

    def add(self, weight: torch.Tensor, offset: int) -> None:
        """`weight` has been widened from the tensor at `offset`."""
        self._offsets[weight.data_ptr(), weight.shape] = offset

    def release(self, weight: torch.Tensor) -> None:
        """Nothing: its memory is the model's own and goes with it."""

    def release_read(self, kept: Iterable[torch.Tensor]) -> None:
        """Nothing, as `release`."""

    def origins(self, weights: Sequence[torch.Tensor]) -> list[Origin | None]:
        """As of `MappedWeights`; None where it is in no tensor of the file alone."""
        offsets = [self._offsets.get((weight.data_ptr(), weight.shape)) for weight in weights]
        by = reckoned_by()
        return [None if offset is None else Origin(self._path, self._stamp, offset, by) for offset in offsets]


def gguf_config(source: GGUFSource) -> Any:
    """The config of the file's model.

    *raises:* LoadError: transformers does not map its architecture.
    """
    return _config(source)[0]


def load_gguf_model(
    source: GGUFSource, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any], WidenedWeights]:
    """The model in `dtype`, transformers' report of the loading, and where its weights come from.

    *raises:* LoadError: as `gguf_config`; others as transformers raises them.
    """
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    weights = WidenedWeights(source)
    config, fields = _config(source)
    if is_gguf_arch_supported(source.architecture):
        model, report = _load_lazily(source, dtype)
    else:
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config, dtype=dtype)
        tensors = _widened(source, shape, fields, dtype, weights)
        loaded: Any = type(shape).from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        model, report = loaded
        if wrong := sorted(report["mismatched_keys"]):
            name, stored, expected = wrong[0]
            raise LoadError(
                f"cannot load the model {source.path}: {len(wrong)} of its tensors have other shapes than the config "
                f"that transformers {transformers_version} makes of it: the first, {name}, is {list(stored)} instead "
                f"of {list(expected)}"
            )
    model.config.name_or_path = str(source.path)
    return model, report, weights


def load_gguf_tokenizer(source: GGUFSource, config: Any) -> Any:
    """The tokenizer and its chat template; None where the file has no vocabulary."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    if not source.num_words:
        return None
    kind = config.model_type if config.model_type in TOKENIZER_MAPPING_NAMES else None
    with _alone(source) as (folder, name):
        # The kind is said so that the file is not asked for it: see the module's text.
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name, tokenizer_type=kind)
    tokenizer.name_or_path = str(source.path)
    return tokenizer


def end_ids(source: GGUFSource) -> tuple[int, ...]:
    """Ids that end an answer beside the end of a text: of a turn, of a message."""
    found = [source.field(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    return tuple(int(token) for token in found if token is not None)


def _config(source: GGUFSource) -> tuple[Any, dict[str, Any]]:
    """The config, and its fields as transformers reads them of the file."""
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        with tempfile.TemporaryDirectory(prefix="quire-") as folder:
            if source.architecture in GGUF_CONFIG_ARCHS:
                with _alone(source) as (where, name):
                    return AutoConfig.from_pretrained(where, gguf_file=name), {}
            header = Path(folder) / "header.gguf"
            source.write_header(header)
            fields = load_gguf_checkpoint(str(header))["config"]
    except Exception as error:
        raise LoadError(
            f"expected a model that transformers {transformers_version} can read from GGUF, {source.path} is of "
            f"architecture {source.architecture!r}: {' '.join(str(error).split())} Take the model as safetensors."
        ) from error
    if source.num_words:
        fields.setdefault("vocab_size", source.num_words)
    return AutoConfig.for_model(**fields), fields


def _widened(
    source: GGUFSource,
    shape: PreTrainedModel,
    fields: dict[str, Any],
    dtype: torch.dtype,
    weights: WidenedWeights,
) -> dict[str, torch.Tensor]:
    """The state dict of the model `shape`."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(source.architecture, TensorProcessor)(config=fields)
    names = get_gguf_hf_weights_map(shape, processor)
    tensors: dict[str, torch.Tensor] = {}
    unknown = []
    for tensor in source:
        result = processor.process(
            weights=widen(tensor).numpy(),
            name=tensor.name,
            tensor_key_mapping=names,
            # A processor of experts puts what it makes of them there itself.
            parsed_parameters={"tensors": tensors, "config": fields},
        )
        if result.name in names:
            # What was not widened may lie in the file's mapping still.
            weight = torch.from_numpy(np.ascontiguousarray(result.weights))
            weight = weight.to(dtype, copy=not tensor.is_quantized)
            tensors[names[result.name]] = weight
            weights.add(weight, tensor.offset or 0)
        elif result.name is not None:
            unknown.append(tensor.name)
    if unknown:
        _log.warning(
            "%s has %d tensors that transformers %s does not read, the first %s: answers may differ from those of the "
            "model it was made of",
            source.path.name,
            len(unknown),
            transformers_version,
            unknown[0],
        )
    return tensors


def _load_lazily(source: GGUFSource, dtype: torch.dtype) -> Any:
    from transformers import GgufConfig

    with _alone(source) as (folder, name):
        return AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            output_loading_info=True,
        )


@contextmanager
def _alone(source: GGUFSource) -> Iterator[tuple[str, str]]:
    """(folder, name) of the file, in a folder with nothing else: transformers prefers what lies beside a file."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        (Path(folder) / "model.gguf").symlink_to(source.path.resolve())
        yield folder, "model.gguf"
