"""Processes that write to a disk tier and are killed, and the checks of the folder afterwards.

python tests/support/disk_kills.py write FOLDER FIRST     stores chains until it is killed, a line for each kept
python tests/support/disk_kills.py kill FOLDER ROUNDS     kills such writers, prints figures as a JSON line
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.tier_values import SHAPE, Value, chain

from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.segment import decode, read_header
from quire.tiers.tier import TierError

CAP = 24 << 20
CHAIN = 6
# The cap is reached after some 150 values, so that the later rounds evict and write pages again.
SURELY_KEPT_BYTES = 8 << 20  # of what was acknowledged last; more than that may be evicted


def values_of(seed: int) -> list[Value]:
    """A chain of 6 segments, 8 to 200 KiB each."""
    return chain(seed, CHAIN, 8 + 24 * (seed % 9))


def write(folder: Path, first: int) -> None:
    """Two threads that store chain after chain and load what they stored; ends when killed."""
    tier = DiskTier(folder, CAP)

    def work(seed: int) -> None:
        while True:
            for index, one in enumerate(values_of(seed)):
                try:
                    assert tier.store(one.key, one.parts, one.info)
                except (
                    TierError
                ):  # refused while the other process keeps the log busy; nothing is acknowledged
                    break  # what continues it has no parent
                os.write(1, f"{time.monotonic_ns()} {seed} {index}\n".encode())
                loaded = tier.load(one.key)
                assert loaded is None or loaded == one.whole
            seed += 2

    def work_or_leave(seed: int) -> None:
        try:
            work(seed)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other thread would go on

    threading.Thread(target=work_or_leave, args=(first + 1,), daemon=True).start()
    work_or_leave(first)


@dataclass
class Kills:
    """Writers of one folder, killed in rounds, two at a time. What is acknowledged is known through their pipes."""

    folder: Path
    seed: int = 0
    rounds: int = 0
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    num_loaded: int = 0
    num_lost: int = 0

    def round(self) -> None:
        chance = random.Random(f"{self.seed} {self.rounds}")
        writers = [self._start(2 * self.rounds + which) for which in range(2)]
        outputs = [writer.stdout for writer in writers]
        lines: list[list[bytes]] = [[], []]
        readers = [
            threading.Thread(target=self._read, args=(output, into))
            for output, into in zip(outputs, lines, strict=True)
        ]
        for reader in readers:
            reader.start()
        if chance.random() < 0.2:  # while it opens the folder, or before
            time.sleep(chance.uniform(0.05, 0.4))
        else:
            until = time.monotonic() + 20
            while not all(lines) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.12))
        for writer in writers:
            writer.kill()
            time.sleep(chance.choice([0, 0, 0.02]))
        for writer, reader in zip(writers, readers, strict=True):
            assert writer.wait() == -9, "the writer ended by itself"
            reader.join()
        self.rounds += 1
        acknowledged = sorted(tuple(map(int, line.split())) for some in lines for line in some)
        self._verify([(seed, index) for _, seed, index in acknowledged])

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "write", str(self.folder), str(number * 1_000_000)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})

    @staticmethod
    def _read(output: IO[bytes], into: list[bytes]) -> None:
        rest = b""
        while some := os.read(output.fileno(), 1 << 16):
            *whole, rest = (rest + some).split(b"\n")
            into.extend(whole)

    def _verify(self, new: list[tuple[int, int]]) -> None:
        """new: what was acknowledged since the last round, (seed, index) in the order of time."""
        tier = DiskTier(self.folder, CAP)
        tier.check()
        must, num_bytes = set[bytes](), 0
        sent = [(values_of(seed)[index], (seed, index)) for seed, index in new]
        for one, _ in reversed(sent):
            num_bytes += len(one.whole)
            if num_bytes > SURELY_KEPT_BYTES:
                break
            must.add(one.key)
        known = {one.key: one for one, _ in sent}
        there = set[bytes]()
        for entry in tier.entries():
            value = tier.peek(entry.key)
            assert value is not None, "an entry without a value"
            assert read_header(value)["key"] == entry.key.hex()
            one = known.get(entry.key)
            if one is not None:
                decode(value, key=one.key, tokens=one.tokens, start=one.start, layout=SHAPE)
                assert value == one.whole
            there.add(entry.key)
            self.num_loaded += 1
        lost = must - there
        self.num_lost += len(lost)
        assert not lost, f"{len(lost)} acknowledged values are not there"
        use = sum(path.stat().st_size for path in self.folder.iterdir())
        assert use <= CAP, f"{use} bytes in a folder of {CAP}"
        self.acknowledged += new
        tier.close()


def main() -> None:
    job, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if job == "write":
        write(folder, number)
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        kills = Kills(Path(inside))
        start = time.perf_counter()
        while kills.rounds < number:
            kills.round()
        print(
            json.dumps(
                {
                    "kills": 2 * kills.rounds,
                    "acknowledged": len(kills.acknowledged),
                    "verified": kills.num_loaded,
                    "lost": kills.num_lost,
                    "seconds": round(time.perf_counter() - start, 1),
                }
            )
        )


if __name__ == "__main__":
    main()
