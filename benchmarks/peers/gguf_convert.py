"""The model as a GGUF file in bf16, its norms in f32: `python gguf_convert.py FROM TO [KIND]`.
KIND: Q4_0, Q4_K_M or Q8_0; TO is then made of the file in bf16 at FROM, by llama.cpp's own rounding.

Runs in the environment of llama.cpp. Written tensor by tensor. Prompts are token ids; the vocabulary is there because
llama-server answers with text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors import safe_open

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[stem]}.weight"


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
    writer = GGUFWriter(f"{target}.part", "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, Path(source) / "tokenizer.json")
    with safe_open(Path(source) / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            tensor = tensors.get_tensor(name)
            if name == "lm_head.weight":  # tied: the embedding serves
                continue
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
            else:
                bits = tensor.to(torch.bfloat16).view(torch.uint16).numpy()
                writer.add_tensor(gguf_name(name), bits, raw_dtype=GGMLQuantizationType.BF16)
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
