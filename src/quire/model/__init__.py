"""A Hugging Face model made to run on the paged cache: prepare, fuse, prove; the embedded model.

Others may use the names below, and
    cache_keyword, paged_cache   the cache argument of a forward
    fingerprint                  the identity of a model
    weight_sizes                 the bytes of a model's weights in memory
    key_offsets                  offsets subtracted from keys that are stored as codes
    prepare                      home of the names below
    sequential_model             a model prepared, by the fast path or by its own forward
    unsupported                  why a model cannot be run, and how it attends
    model_lock                   one holder of a model
    rope                         rotary embeddings
    placement                    weights on the device that computes
    support                      how well a model type and forms of weights are proved
    state, state.state_source    mixers of state layers: adapters, their proof and installation
    prove.model_record           whether a model is still the one that was proved
"""

from quire.model.prepare import PreparedModel

__all__ = ["PreparedModel"]
