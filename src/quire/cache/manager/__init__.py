"""The block manager in plain Python: pool, prefix tree, reserve, commit, evict."""
