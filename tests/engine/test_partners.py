"""An option that modifies another option is refused without it, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import tiny_llm

from quire.errors import ArgumentError

ALONE: list[tuple[dict[str, Any], str]] = [
    ({"disk_cache_size": "1GiB"}, "disk_cache_size also disk_cache, the folder"),
    ({"disk_cache_size": "8GiB"}, "disk_cache_size also disk_cache, the folder"),
    ({"disk_cache_size": "1GiB", "host_cache": "1MiB"}, "disk_cache_size also disk_cache, the folder"),
    ({"cache_write": "through"}, "cache_write also host_cache, disk_cache or remote_cache"),
    ({"swap_memory": "1GiB", "preemption": "recompute"}, "swap_memory also preemption swap or auto"),
    ({"swap_memory": "1GiB", "storage": "contiguous"}, "swap_memory also storage paged or virtual or auto"),
    ({"pin_memory": "1MiB", "storage": "growing"}, "pin_memory also storage paged or virtual or auto"),
    ({"piece_size": "2MiB"}, "piece_size also storage virtual or auto; paged does not use it"),
]


@pytest.mark.parametrize(("options", "says"), ALONE)
def test_alone_it_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        tiny_llm.llm(**options)


def test_with_its_partner_it_is_taken(tmp_path: Path) -> None:
    for options in (
        {"disk_cache": tmp_path, "disk_cache_size": "64MiB", "cache_write": "through"},
        {"host_cache": "1MiB", "cache_write": "through", "swap_memory": "1MiB"},
        {"preemption": "recompute", "storage": "contiguous"},
    ):
        tiny_llm.llm(**options).close()
