"""How well each model type and form of weights is tested: the levels, and the level of each type and form.

    proved         bits or tokens equal those of an outside judge: transformers' model or `generate`, llama.cpp, the
                   package or the code that defines a format
    works          covered by Quire's own tests
    experimental   not covered by regular tests
    refused        refused before the first answer

`FORMS` names the test of each form of weights; docs/support.md, which `scripts/support` prints, has the other parts of
Quire too. Model types are those of docs/models.md, saved here in families.txt (`scripts/support families` prints it).

Cost: a look-up; families.txt is read once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from quire.weights.codes.readers import GGUF, GGUF_TYPES

__all__ = [
    "DEQUANTIZED_NOTE",
    "EXPERIMENTAL",
    "FAMILIES",
    "FORMS",
    "PROVED",
    "REFUSED",
    "WORKS",
    "Form",
    "Support",
    "family_support",
    "runs_by_own_forward",
    "weight_support",
]

PROVED, WORKS, EXPERIMENTAL, REFUSED = ("proved", "works", "experimental", "refused")


@dataclass(frozen=True)
class Support:
    """part: "family" or "weights". name: of the model type or form. note: the judge or a remark."""

    part: str
    name: str
    level: str
    note: str

    def __str__(self) -> str:
        return f"{self.part} {self.name}: {self.level}" + f", {self.note}" * bool(self.note)


@dataclass(frozen=True)
class Form:
    """level, and its test, as FILE::NAME. note: the judge, or the limits."""

    level: str
    test: str
    note: str = ""


# By the mode of a model type in families.txt: level and note.
FAMILIES = {
    "paged": (PROVED, "float32 tokens of model.generate"),
    "own": (PROVED, "float32 tokens of model.generate, by its own forward, one sequence at a time"),
    "own by token": (PROVED, "float32 tokens of model.generate, by its own forward, one token at a time"),
    "refused": (REFUSED, "the start says why"),
    "not built": (EXPERIMENTAL, "no tiny model of it could be tried; a start proves the model or refuses it"),
}
_UNKNOWN = (EXPERIMENTAL, "an untested type; a start proves the model or refuses it")

_SWEEP = "tests/model/test_model_list.py::test_the_page_is_what_the_script_prints"
_CHECKPOINTS = "tests/weights/test_checkpoint_methods.py::"
_GGUF = Form(
    PROVED,
    "tests/weights/test_gguf_codes.py::test_random_bytes_have_the_bits_of_the_package",
    "bits of the package gguf",
)
FORMS = {
    "float32": Form(PROVED, _SWEEP, "tokens of model.generate"),
    "bfloat16": Form(PROVED, _SWEEP, "tokens of model.generate, unless rounding decides"),
    "float16": Form(WORKS, "tests/exact/test_bit_for_bit.py::test_alone_and_among_32_others"),
    "gptq": Form(WORKS, f"{_CHECKPOINTS}test_gptq"),
    "awq": Form(WORKS, f"{_CHECKPOINTS}test_awq"),
    "compressed-tensors": Form(
        WORKS,
        f"{_CHECKPOINTS}test_compressed_tensors_packed",
        "the package itself is compared where it is installed",
    ),
    "fp8": Form(WORKS, f"{_CHECKPOINTS}test_fp8_in_blocks"),
    "fbgemm_fp8": Form(WORKS, f"{_CHECKPOINTS}test_fp8_of_channels_and_of_all"),
    "mxfp4": Form(PROVED, f"{_CHECKPOINTS}test_mxfp4_experts", "bits of transformers' own conversion"),
    "bitsandbytes": Form(WORKS, f"{_CHECKPOINTS}test_bitsandbytes_in_4_bits"),
    **{GGUF + name: _GGUF for name in GGUF_TYPES},
    "int8": Form(WORKS, "tests/weights/test_quantized_modules.py::test_it_is_served", "rounded at load"),
    "int4": Form(
        WORKS,
        "tests/weights/test_quantized_modules.py::test_a_model_is_rounded_by_pattern",
        "rounded at load",
    ),
}
"""By a plan's name of the weights: the dtype of a dense checkpoint, a quant_method, a GGUF type, a rounding."""
DEQUANTIZED_NOTE = "dequantized by the package gguf at load"
"""For GGUF types that are not read as codes."""


def family_support(model_type: str) -> Support:
    """The support of a model type of transformers, known or unknown."""
    level, note = FAMILIES.get(_families().get(model_type, ""), _UNKNOWN)
    return Support("family", model_type, level, note)


def runs_by_own_forward(model_type: str) -> bool:
    """Whether models of the type run by their own forward, as far as families.txt knows."""
    return _families().get(model_type, "").startswith("own")


def weight_support(name: str) -> Support:
    """The support of a form of weights; int4 stands for int4:64 too."""
    form = FORMS.get(name) or FORMS.get(name.partition(":")[0])
    if form is None:
        return Support("weights", name, EXPERIMENTAL, DEQUANTIZED_NOTE * name.startswith(GGUF))
    return Support("weights", name, form.level, form.note)


@functools.cache
def _families() -> dict[str, str]:
    """The key of `FAMILIES` by model type."""
    lines = Path(__file__).with_name("families.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)
