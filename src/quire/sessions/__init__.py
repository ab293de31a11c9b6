"""Conversations and snapshots.

Others may use
    conversation, transcript     what has been said, and its tokens
    snapshots, snapshot_files    a conversation kept in the disk cache, and the files of it
"""
