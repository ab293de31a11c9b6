"""A Hugging Face model made to run on the paged cache: load, prepare, linear, probe; the embedded model.

Others may use the names below, and
    cache_keyword, paged_cache   the cache argument of a forward
    fingerprint                  the identity of a model
    quantized                    modules that compute from quantized weights
    linear, weight_sizes         packed linear layers, and the bytes of weights in memory
    key_offsets                  offsets subtracted from keys that are stored as codes
    load, prepare                homes of the names below
    huge_pages                   weights moved to huge pages
    dense_weights                dense values of packed weights
    sequential_model             a model prepared, by the fast path or by its own forward
    unsupported                  why a model cannot be run, and how it attends
    model_lock, module_patch     one holder of a model, and methods replaced on a module
    rope                         rotary embeddings
    support                      how well a model type and forms of weights are proved
    state, state.state_source        mixers of state layers: adapters, their proof and installation
    prove.hooks, prove.model_record  whether a model is still the one that was proved
"""

from quire.model.load import LoadedModel, load
from quire.model.prepare import PreparedModel

__all__ = ["LoadedModel", "PreparedModel", "load"]
