"""A Hugging Face model made to run on the paged cache: load, prepare, linear, probe; the embedded model.

Others may use the names below, and
    cache_keyword, paged_cache   what a forward is given for a cache
    fingerprint                  which model it is
    quantized                    modules that compute from codes
    linear, weight_rows          packed linear layers, and what weights take as they are held
    key_offsets                  what is taken off keys that are kept in codes
    load, prepare                homes of the names below
    huge_pages                   weights moved to huge pages
    plain_weights                the memory of weights that are held in another form
    own_forward                  a model prepared, by the fast path or by its own forward
    missing                      why a model cannot be run, and how it attends
    model_lock, overlay          one holder of a model, and forwards laid over its own
    rope                         rotary embeddings
    support                      how well a model type and forms of weights are proved
    state, state.source          mixers of state layers: adapters, their proof and installation
    prove.hooks, prove.stamp     whether a model is still what was proved
"""

from quire.model.load import LoadedModel, load
from quire.model.prepare import PreparedModel

__all__ = ["LoadedModel", "PreparedModel", "load"]
