"""The model as a GGUF file in bf16, its norms in f32: `python gguf_convert.py FROM TO [KIND]`.
KIND: Q4_0, Q4_K_M or Q8_0; TO is then made of the file in bf16 at FROM, by llama.cpp's own rounding.

Runs in the environment of llama.cpp. Written tensor by tensor, as `gguf_kinds.py` says for the model's type. Prompts
are token ids; the vocabulary is there because llama-server answers with text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf_kinds import ARCHITECTURES, add_metadata, tensors_of
from safetensors import safe_open


def _add_vocabulary(writer: GGUFWriter, tokenizer: Path) -> None:
    """Its words; llama.cpp insists on a merge, whose result takes the place of the last word."""
    ids: dict[str, int] = json.loads(tokenizer.read_text())["model"]["vocab"]
    words = sorted(ids, key=ids.__getitem__)
    words[-1] = "!!"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.NORMAL] * len(words))
    writer.add_token_merges(["! !"])


def main(source: str, target: str, kind: str | None = None) -> None:
    if kind is not None:
        return _round(source, target, kind)
    config = json.loads((Path(source) / "config.json").read_text())
    writer = GGUFWriter(f"{target}.part", MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]])
    add_metadata(writer, config)
    _add_vocabulary(writer, Path(source) / "tokenizer.json")
    with safe_open(Path(source) / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            tensor = tensors.get_tensor(name)
            for target_name, value in tensors_of(name, tensor, config).items():
                if value.dtype == torch.float32:
                    writer.add_tensor(target_name, value.numpy())
                else:
                    bits = value.view(torch.uint16).numpy()
                    writer.add_tensor(target_name, bits, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(f"{target}.part").rename(target)


def _round(source: str, target: str, kind: str) -> None:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    status = llama_cpp.llama_model_quantize(source.encode(), f"{target}.part".encode(), params)
    if status != 0:
        raise SystemExit(f"llama_model_quantize gave {status}")
    Path(f"{target}.part").rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
