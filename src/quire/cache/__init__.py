"""Which token lives where: pool, prefix tree, groups, sequences, and the facade `Cache`. No tensors, no torch."""
