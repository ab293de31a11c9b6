"""Common decoder layers run in a few native calls: matched by structure, proved on the model itself, reversible.

`fuse(prepared, attended)` looks at every module and installs a fused forward on those it knows the structure of:

    norm.py       RMS and layer norms
    mlp.py        gate, up, activation, down - or up, activation, down
    attention.py  q, k, v, their norms, rotary embedding, K and V to their slots, attention, output
    mixer.py      the mixer of a state layer: projections, convolution, recurrence, gated norm, output
    layer.py      a whole layer of those: norm, attention or mixer, residual, norm, MLP, residual
    decoder.py    all layers in one call, where nothing else stands between embedding and vocabulary

    fused_proof.py which of the candidates a module is (F1), and that the kernel loses no more than the module (F2)
    fused_state_proof.py the same of mixers, and of layers that have one

What a module may be is decided by its parts and by what its `forward` names, never by the name of its class or model;
what it is, by the proof. A module that does not pass keeps its own forward; the others go on. The originals are the
plain twins of the kernels.

Invariants
    U1  a fused forward serves exactly while `Fused.active` (within `PreparedModel.forward`) and answers only calls it
        was proved for; any other call goes to the original.
    U2  after `restore()` every module has its own forward again.
"""

from quire.model.fused.decoder import FusedDecoder, match_decoder
from quire.model.fused.fuse import Fused, fuse, fuse_again

__all__ = ["Fused", "FusedDecoder", "fuse", "fuse_again", "match_decoder"]
