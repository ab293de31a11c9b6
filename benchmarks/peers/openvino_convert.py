"""The model as OpenVINO's intermediate representation, by optimum-intel: `python openvino_convert.py FROM TO`.

Runs in the environment of openvino. Weights stay in 16 bit (bf16 in the checkpoint, so none is rounded).
"""

from __future__ import annotations

import sys
from pathlib import Path

from openvino import save_model  # pyright: ignore[reportMissingImports]
from openvino_tokenizers import convert_tokenizer  # pyright: ignore[reportMissingImports]
from optimum.exporters.openvino import main_export  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer


def main(source: str, target: str) -> None:
    main_export(source, target, task="text-generation-with-past", convert_tokenizer=False)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    save_model(tokenizer, Path(target) / "openvino_tokenizer.xml")
    save_model(detokenizer, Path(target) / "openvino_detokenizer.xml")
    (Path(target) / "complete").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
