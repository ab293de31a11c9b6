"""Everything that is read from a checkpoint, and the weights in memory: dense, packed for the processor, or quantized.

    load         a model with its tokenizer, of a folder, a GGUF file, a Hub id or a loaded model
    sources/     the tensors of a checkpoint: safetensors, GGUF, a live module
    codes/       quantized weights: their forms, products and readers
    gguf/        the config and tensor names of a GGUF file, one file an architecture
    saved_*      packed weights in a file, mapped at the next start

Others may use the names below, and
    load                               home of the names below
    linear, packed_parameter           packed linear layers, and their Parameters
    experts, expert_layout, quantized_experts   experts of a mixture
    quantized_modules, dense_weights   modules on quantized weights, and their dense values
    saved_weights, saved_codes, saved_linears, saved_check   packed weights in a file
    meta_weights                       weights that have a shape and no memory
    huge_pages                         weights moved to huge pages
    checkpoint_files, config_file, generation_config, tokenizer   the other files of a checkpoint
    codes, codes.readers, codes.rounding   quantized weights
    gguf, sources                      GGUF architectures; sources of tensors
"""

from quire.weights.load import LoadedModel, load

__all__ = ["LoadedModel", "load"]
