"""The model as OpenVINO's intermediate representation, by optimum-intel: `python openvino_convert.py FROM TO [BITS]`.

Runs in the environment of openvino. Weights stay in 16 bit (bf16 in the checkpoint, so no weight is rounded), or nncf
rounds them: 8 bits a channel, or 4 bits symmetric in groups of 128 with embedding and projection in 8.
"""

from __future__ import annotations

import sys
from pathlib import Path

from openvino import save_model  # pyright: ignore[reportMissingImports]
from openvino_tokenizers import convert_tokenizer  # pyright: ignore[reportMissingImports]
from optimum.exporters.openvino import main_export  # pyright: ignore[reportMissingImports]
from optimum.intel import OVConfig, OVWeightQuantizationConfig  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer


def main(source: str, target: str, bits: str = "16") -> None:
    rounding = {
        "16": None,
        "8": OVWeightQuantizationConfig(bits=8, sym=True),
        "4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0),
    }[bits]
    main_export(
        source,
        target,
        task="text-generation-with-past",
        convert_tokenizer=False,
        ov_config=rounding and OVConfig(quantization_config=rounding),
    )
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    save_model(tokenizer, Path(target) / "openvino_tokenizer.xml")
    save_model(detokenizer, Path(target) / "openvino_detokenizer.xml")
    (Path(target) / "complete").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
