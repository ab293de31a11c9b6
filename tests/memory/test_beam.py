"""A beam table against gathering: a rewritten table over one buffer gives the same bits as moved copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire import KVSpec
from quire.attention import AttentionOptions, attention_batch
from quire.config import EngineConfig
from quire.devices import device_of
from quire.engine.open_storage import open_storage
from quire.errors import ArgumentError
from quire.memory.beam import BeamTable
from quire.memory.view import KVView

BEAMS, PROMPT, STEPS = 4, 37, 300
SPEC = KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32")


@pytest.mark.parametrize("backend", ["native", "python"])
def test_a_table_is_as_good_as_gathering(backend: str) -> None:
    """Past several larger buffers, with parents drawn at random; the gathered copies are moved at every step."""
    if backend == "native":
        pytest.importorskip("quire._native")
    kernels = device_of(backend)
    random = torch.Generator().manual_seed(3)
    opened = open_storage(EngineConfig(storage="growing", kv_memory="16MiB", max_num_seqs=4), SPEC, 4096)
    storage, cache = opened.storage, opened.cache
    sequence = cache.open(np.arange(PROMPT, dtype=np.int32))
    table = BeamTable(BEAMS, PROMPT)
    options = AttentionOptions(scale=0.25)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def step(num_new: int) -> list[int]:
        """Reserve, and the entry of each layer's table."""
        plan = cache.reserve([sequence], [num_new])
        assert plan is not None
        return [int(entries[0, 0]) for entries, _ in storage.prepare(plan, np.array([sequence.id]))]

    # gathered[layer] = K and V of every beam by itself: [beam, position, kv head, dim]
    gathered = []
    entries = step(PROMPT)
    for layer, entry in enumerate(entries):
        k, v = drawn(PROMPT, 2, 16), drawn(PROMPT, 2, 16)
        kernels.write(storage.token_view(layer), k, v, torch.arange(entry, entry + PROMPT))
        gathered.append([x.expand(BEAMS, -1, -1, -1).clone() for x in (k, v)])
    cache.commit(sequence, PROMPT)

    moved = 0
    for number in range(STEPS):
        parents = torch.randint(BEAMS, (BEAMS,), generator=random)
        before = storage.copied_bytes
        table.reorder(parents.numpy())
        assert storage.copied_bytes == before
        gathered = [[x[parents] for x in pair] for pair in gathered]
        table.append()
        sequence.append(np.arange(BEAMS, dtype=np.int32))
        assert table.num_tokens == sequence.num_tokens
        old, entries = entries, step(BEAMS)
        moved += old != entries
        for layer, entry in enumerate(entries):
            k, v, query = drawn(BEAMS, 2, 16), drawn(BEAMS, 2, 16), drawn(BEAMS, 4, 16)
            kernels.write(storage.token_view(layer), k, v, torch.from_numpy(table.slots(entry)))
            gathered[layer] = [
                torch.cat([past, new[:, None]], dim=1)
                for past, new in zip(gathered[layer], (k, v), strict=True)
            ]
            if number % 7 and number < STEPS - 2:
                continue  # attending every time takes long on the Python back end
            contexts = [table.length] * BEAMS
            through_table = kernels.run(
                storage.token_view(layer),
                query,
                attention_batch(np.arange(BEAMS + 1), contexts, table.block_tables(entry), 1),
                options,
            )
            rows = KVView(*(x.transpose(1, 2).contiguous() for x in gathered[layer]), table.length)
            of_copies = kernels.run(
                rows,
                query,
                attention_batch(
                    np.arange(BEAMS + 1), contexts, np.arange(BEAMS, dtype=np.int32)[:, None], table.length
                ),
                options,
            )
            assert torch.equal(through_table, of_copies)
        cache.commit(sequence, sequence.num_tokens)
    assert moved >= 3
    storage.close()


def test_beams_that_cannot_be_are_refused() -> None:
    table = BeamTable(3, 2)
    table.append()
    before = table.rows.copy()
    for wrong in ([0, 1], [0, 1, 3], [-1, 0, 0], [0.0, 1.0, 2.0]):
        with pytest.raises(ArgumentError, match="parent"):
            table.reorder(wrong)
    assert (table.rows == before).all()
    with pytest.raises(ArgumentError, match="at least one beam"):
        BeamTable(0, 4)
