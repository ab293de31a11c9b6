"""Common decoder layers run in a few native calls: matched by structure, proved on the model itself, reversible.

`fuse(prepared, attended)` inspects every module and installs a fused forward on modules of a known structure:

    norm.py       RMS and layer norms
    mlp.py        gate, up, activation, down - or up, activation, down
    attention.py  q, k, v, their norms, rotary embedding, K and V to their slots, attention, output
    mixer.py      the mixer of a state layer: projections, convolution, recurrence, gated norm, output
    layer.py      a whole layer of those: norm, attention or mixer, residual, norm, MLP, residual
    decoder.py    all layers in one call, if there is nothing else between embedding and vocabulary

    fused_proof.py        which candidate a module is (F1), and that the kernel loses no more than the module (F2)
    fused_state_proof.py  the same for mixers, and for layers that have one

A module's parts and the names in its `forward` select the candidates, never the name of its class or model; the proof
decides between them. A module that does not pass keeps its own forward; the others are fused. The original modules are
the reference twins of the kernels.

Invariants
    U1  a fused forward serves only while `Fused.active` (within `PreparedModel.forward`) and only calls of the form it
        was proved for; any other call goes to the original.
    U2  after `restore()` every module has its own forward again.
"""

from quire.model.fused.decoder import FusedDecoder, match_decoder
from quire.model.fused.fuse import Fused, fuse, fuse_again

__all__ = ["Fused", "FusedDecoder", "fuse", "fuse_again", "match_decoder"]
