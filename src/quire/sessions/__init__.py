"""Conversations and snapshots.

Others may use
    conversation_core, transcript   a conversation between turns, and its tokens
    snapshots, snapshot_files       conversations saved in the disk cache, and their files
"""
