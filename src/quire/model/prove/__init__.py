"""Proof that a replacement computes what the original module computes, and the facts that such a proof rests on.

    error_bounds.py        the bounds: F1 which candidate a module is, F2 that the kernel loses no more than the module
    upcast.py              a module computed in a wider type, its weights upcast one module at a time
    equal_modules.py       which modules are equal but for their weights, so that one of them is tested for all
    recorded_calls.py      recorded calls of the model's own modules, which can be repeated in other ways
    model.py               the part of the prepared model that proofs use
    text.py                the text whose activations are compared
    replaced_operators.py  proof of modules whose operators were replaced by row-invariant ones
    indexer.py             indexers limited to a few tokens during a proof
    latent_proof.py        proof of attention on latents
    model_probe.py         proof of the whole model, on paged memory
    generated_tokens.py    proof that `generate` gives what the forward gives
    model_record.py        F3: the facts that a proof rests on, and whether they still hold
    hooks.py               hooks and replaced forwards on a module

Callers: the fused blocks (`quire.model.prove.fused_proof`), the experts, the prepared model (`quire.model.prepare`).
"""
