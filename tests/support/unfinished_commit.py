"""Writers of a disk tier that die at critical points: one within a commit, one before it.

python tests/support/unfinished_commit.py within FOLDER    dies when the log has its commit, the others do not know it
python tests/support/unfinished_commit.py before FOLDER    opens the folder, waits for a line, dies with bytes written

SQLite makes a commit durable in the log first and tells other processes afterwards, through the shared memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.tier_values import value

from quire.tiers.disk.disk_schema import FILE_NAME
from quire.tiers.disk.disk_tier import DiskTier

CAP = 24 << 20
DEATH = 9  # their exit status


def die_within_commit(tier: DiskTier) -> None:
    shared = tier.path / f"{FILE_NAME}-shm"
    known = shared.read_bytes()

    def die() -> None:
        with shared.open("r+b") as file:
            file.write(known)
        os._exit(DEATH)

    tier._index._write_lock.release = die
    one = value(1, 104)
    tier.store(one.key, one.parts, one.info)


def die_before_commit(tier: DiskTier) -> None:
    one = value(0, 8)
    assert tier.store(one.key, one.parts, one.info)
    print("ready", flush=True)
    sys.stdin.readline()
    tier._index.insert = lambda *row: os._exit(DEATH)
    one = value(2, 200)
    tier.store(one.key, one.parts, one.info)


if __name__ == "__main__":
    die_in = {"within": die_within_commit, "before": die_before_commit}[sys.argv[1]]
    die_in(DiskTier(Path(sys.argv[2]), CAP))
