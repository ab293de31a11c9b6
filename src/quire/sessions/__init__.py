"""Sessions, conversations and snapshots.

Others may use
    session, session_registry       what the engine knows of a client's sessions, and does for them
    transcript                      the tokens of a conversation between turns
    snapshots, snapshot_files       conversations saved in the disk cache, and their files
"""
