"""Computes the logits of a GGUF file with llama.cpp, in float32, with keys and values in float32, on one thread.

    python llama_cpp_logits.py FILE TOKENS OUT

Runs in an environment that has llama-cpp-python. TOKENS: an .npz of prompts; OUT: one of the logits [token, word] of
each, by the same names.
"""

from __future__ import annotations

import sys

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np


def main() -> None:
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False  # weights as they are, in no other layout
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), model_params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {sys.argv[1]}")
    num_words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    prompts = np.load(sys.argv[2])
    np.savez(sys.argv[3], **{name: logits_of(model, tokens, num_words) for name, tokens in prompts.items()})


def logits_of(model: llama_cpp.llama_model_p, tokens: np.ndarray, num_words: int) -> np.ndarray:
    params = llama_cpp.llama_context_default_params()
    # No more cells than the prompt needs: LongRoPE's factors are chosen by them. They come in multiples of 256.
    params.n_ctx = params.n_batch = params.n_ubatch = -(-len(tokens) // 256) * 256
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp cannot make a context of {params.n_ctx} cells")
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for position, token in enumerate(tokens.tolist()):
        batch.token[position] = token
        batch.pos[position] = position
        batch.n_seq_id[position] = 1
        batch.seq_id[position][0] = 0
        batch.logits[position] = True
    status = llama_cpp.llama_decode(context, batch)
    if status != 0:
        raise SystemExit(f"llama_decode gave {status} for {len(tokens)} tokens")
    shape = (len(tokens), num_words)
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return logits


if __name__ == "__main__":
    main()
