"""Conversations and snapshots.

Others may use
    transcript                      the tokens of a conversation between turns
    snapshots, snapshot_files       conversations saved in the disk cache, and their files
"""
