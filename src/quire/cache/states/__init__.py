"""The cache of a model with recurrent layers: blocks and states of one prefix are found, kept and evicted together.

state_cache     `StateCache`: a `Cache` whose sequences have a state slot each
checkpoints     the choice of positions whose state is kept
memory_split    how blocks and state slots share one memory
"""
