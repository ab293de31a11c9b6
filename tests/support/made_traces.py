"""Made-up traces for tests of the simulation."""

from __future__ import annotations

import random

from quire.simulate import TraceRequest, Workload

__all__ = ["chats"]


def chats(
    seed: int, num_requests: int = 60, *, block_tokens: int = 16, num_chats: int = 6, every_s: float = 1.0
) -> Workload:
    """Chats that grow by 1 to 4 blocks a turn, among prompts that are seen once; all begin with one block. Each prompt
    ends in a partial block of its own. The answers have one token."""
    generator = random.Random(seed)
    num_ids = 1
    paths = [[0] for _ in range(num_chats)]
    requests = []
    for number in range(num_requests):
        chat, num_new = generator.randrange(num_chats), generator.randrange(1, 5)
        if is_once := generator.random() < 0.25:
            num_new += 2
        path = [*([0] if is_once else paths[chat]), *range(num_ids, num_ids + num_new)]
        num_ids += num_new
        if not is_once:
            paths[chat] = path if len(path) < 16 else [0]
        num_tokens = block_tokens * len(path) + generator.randrange(2, block_tokens)
        ids = (*path, 10**6 + number)
        requests.append(TraceRequest(every_s * number, num_tokens, 1, ids, session=str(chat)))
    return Workload("chats", tuple(requests), block_tokens=block_tokens)
