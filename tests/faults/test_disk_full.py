"""A full disk, simulated by a limit on the size of files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.tier_values import value

from quire.tiers.disk.disk_tier import DiskTier

TESTS = Path(__file__).parent.parent
CAP = 16 << 20
WRITER = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support.tier_values import value
from quire.errors import QuireError
from quire.tiers.disk.disk_tier import DiskTier

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
kept, errors = [], []
try:
    tier = DiskTier(Path(sys.argv[2]), 16 << 20)
except QuireError as error:
    errors.append(str(error))
else:
    for seed in range(60):
        one = value(seed, 20)
        try:
            if tier.store(one.key, one.parts, one.info):
                kept.append(seed)
            assert tier.load(one.key) in (None, one.whole)
        except QuireError as error:
            errors.append(str(error))
    tier.close()
print(json.dumps([kept, errors]))
"""


@pytest.mark.parametrize("limit", [1, 20_000, 60_000, 150_000, 300_000, 1 << 20, 5 << 20])
@pytest.mark.parametrize("begun", [False, True])
def test_storing_fails_with_one_line_and_nothing_kept_is_lost(
    tmp_path: Path, limit: int, begun: bool
) -> None:
    first = value(1000, 20)
    if begun:
        tier = DiskTier(tmp_path, CAP)
        assert tier.store(first.key, first.parts, first.info)
        tier.close()
    command = [sys.executable, "-c", WRITER, str(TESTS), str(tmp_path), str(limit)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, errors = json.loads(result.stdout)
    assert result.stderr == ""
    assert all("\n" not in error and str(tmp_path) in error for error in errors)
    assert bool(errors) == (limit < 5 << 20)
    tier = DiskTier(tmp_path, CAP)
    tier.check()
    for seed in kept:
        assert tier.load(value(seed, 20).key) == value(seed, 20).whole
    if begun:
        assert tier.load(first.key) == first.whole
    assert tier.store(first.key, first.parts, first.info)
    tier.close()
