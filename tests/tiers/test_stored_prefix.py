"""The length of a prompt's stored prefix in a disk cache, and the point where stored content diverges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tier_values import ROOT, Value, chain, value

from quire.cache.block_hash import root_key
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.stored_prefix import stored_prefixes

OTHER = root_key(b"model", b"another namespace")


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    tier = DiskTier(tmp_path, 16 << 20)
    for one in [*chain(1, 3, 20), *chain(2, 2, 10), *chain(1, 2, 20, root=OTHER)]:
        tier.store(one.key, one.parts, one.info)
    return tier


def tokens_of(values: list[Value]) -> np.ndarray:
    return np.concatenate([one.tokens for one in values])


@pytest.mark.parametrize("differs_at", [0, 1, 19, 20, 33, 40, 59])
def test_where_it_leaves_what_is_stored(tier: DiskTier, differs_at: int) -> None:
    stored = tokens_of(chain(1, 3, 20))
    asked = stored.copy()
    asked[differs_at:] = 5000
    mine = {found.root.root: found for found in stored_prefixes(tier, asked)}[ROOT]
    segment = differs_at // 20 * 20
    assert (mine.num_tokens, mine.num_common) == (segment, differs_at)
    if differs_at:
        assert mine.behind.tolist() == stored[differs_at : segment + 20].tolist()
    tier.close()


def test_a_prompt_that_ends_within_a_value_and_one_that_goes_on(tier: DiskTier) -> None:
    stored = tokens_of(chain(1, 3, 20))
    first = {found.root.root: found for found in stored_prefixes(tier, stored[:30])}
    assert (first[ROOT].num_tokens, first[ROOT].num_common) == (20, 30)
    assert first[ROOT].behind.tolist() == stored[30:40].tolist()
    longer = np.append(stored, [7, 8, 9]).astype(np.int32)
    found = stored_prefixes(tier, longer)
    assert [(one.root.root, one.num_tokens, one.num_common) for one in found] == [
        (ROOT, 60, 60),
        (OTHER, 40, 40),
    ]
    assert [len(one.behind) for one in found] == [0, 0]
    tier.close()


def test_extra_keys_leave_it_where_they_differ(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 16 << 20)
    one = value(3, 20, extra_keys=((5, b"image"),))
    tier.store(one.key, one.parts, one.info)
    for keys, expected in (({5: b"image"}, 20), ({5: b"other"}, 5), ({}, 5), ({5: b"image", 9: b"x"}, 9)):
        (found,) = stored_prefixes(tier, one.tokens, keys)
        assert found.num_common == expected
        assert found.num_tokens == (20 if expected == 20 else 0)
    tier.close()
