"""Proof that what serves in a module's place computes what the module computes, and what such a proof rests on.

    error_bounds.py the bounds, written down once: F1 which candidate it is, F2 that the kernel loses no more
    upcast.py     a module computed in a wider type, its weights widened one module at a time
    equal_modules.py which modules are alike, so that one is asked for all
    recorded_calls.py calls of the model's own modules, recorded, and made again in other ways
    model.py      what proofs use of the prepared model
    text.py       the text whose activations are looked at
    replaced_operators.py modules whose operators were replaced by row-invariant ones
    model_probe.py the same of the whole model, on paged memory
    model_record.py F3: what a proof rests on, and whether it is still so
    hooks.py      what somebody has put on a module

Who asks: the fused blocks (`quire.model.fused.fused_proof`), the experts, the model that is prepared
(`quire.model.prepare`).
"""
