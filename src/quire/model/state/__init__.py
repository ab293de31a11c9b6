"""State layers of transformers models, run on `quire.recurrence` over flattened rows: one adapter a mixer.

`state_adapters` finds the mixers of a model, `prove_states` tests that each computes what its structure suggests, and
`install_states` has them serve the engine's calls. The engine's cache is a `StateSource`: it has the step
(`RecurrenceStep`) and the states of a layer. `quire.spec.state_spec` reads the same fields from a config alone.
"""

from quire.model.prove.state_proof import prove_states
from quire.model.state.adapter import StateAdapter
from quire.model.state.install import install_states
from quire.model.state.mixer_registry import adapter_of, state_adapters
from quire.model.state.state_source import StateSource, state_source

__all__ = [
    "StateAdapter",
    "StateSource",
    "adapter_of",
    "install_states",
    "prove_states",
    "state_adapters",
    "state_source",
]
