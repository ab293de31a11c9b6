"""An engine in one page: continuous batching on `quire.Cache`, without `quire.LLM` and without torch.

The "model" is one layer of causal attention in numpy with random weights. Its K and V live in two arrays
addressed by slot; the cache decides which slot belongs to which token. Run: python examples/engine_loop.py
"""

import numpy as np

from quire import Cache, KVSpec

VOCAB, DIM, BLOCK, BUDGET = 64, 16, 4, 12
rng = np.random.default_rng(0)
embed, place, w_out = rng.normal(size=(VOCAB, DIM)), rng.normal(size=(64, DIM)), rng.normal(size=(DIM, VOCAB))
w_q, w_k, w_v = rng.normal(size=(3, DIM, DIM)) / 2
spec = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=DIM)
cache = Cache(spec, num_blocks=12, block_size=BLOCK)
keys, values = np.full((2, cache.num_blocks, BLOCK, DIM), np.nan)  # unwritten slots must never be read


def forward(plan, tokens, positions):
    """One step for all sequences at once: the logits of each one's last token."""
    for source, destination, count in plan.copies:  # copy-on-write, before anything is written
        for pool in (keys, values):
            pool[destination, :count] = pool[source, :count]
    hidden = embed[tokens] + place[positions]
    keys.reshape(-1, DIM)[plan.slot_mapping] = hidden @ w_k
    values.reshape(-1, DIM)[plan.slot_mapping] = hidden @ w_v
    outputs = []
    for table, length, end in zip(plan.block_tables, plan.context_lengths, plan.query_start[1:], strict=True):
        k, v = (pool[table].reshape(-1, DIM)[:length] for pool in (keys, values))
        score = k @ (hidden[end - 1] @ w_q)
        weight = np.exp(score - score.max())
        outputs.append(weight / weight.sum() @ v)
    return np.array(outputs) @ w_out


def generate(prompts, max_tokens):
    """Greedy continuations: admit, compute prompts in chunks, decode, preempt when there is no room, finish."""
    known = [list(prompt) for prompt in prompts]
    waiting, running = list(range(len(prompts))), {}
    while waiting or running:
        if waiting and (not running or cache.num_free_blocks * BLOCK > len(known[waiting[0]])):
            request = waiting.pop(0)
            seq = running[request] = cache.open(known[request])
            print(f"  request {request}: {seq.num_cached_tokens} of its {seq.num_tokens} tokens are cached")
        batch, left = [], BUDGET
        for request, seq in running.items():
            start = seq.num_computed_tokens
            positions = np.arange(start, min(start + left, seq.num_tokens))
            if len(positions):
                batch.append((request, seq, positions))
                left -= len(positions)
        plan = cache.reserve([seq for _, seq, _ in batch], [len(positions) for *_, positions in batch])
        if plan is None:  # the youngest starts over later, and finds again what nobody needed meanwhile
            request, seq = running.popitem()
            cache.close(seq)
            waiting.insert(0, request)
            print(f"  request {request}: preempted")
            continue
        tokens = np.concatenate([seq.tokens[positions] for _, seq, positions in batch])
        logits = forward(plan, tokens, np.concatenate([positions for *_, positions in batch]))
        for (request, seq, _), row, length in zip(batch, logits, plan.context_lengths, strict=True):
            cache.commit(seq, length)
            if length == seq.num_tokens:
                known[request].append(int(row.argmax()))
                seq.append(known[request][-1:])
            if len(known[request]) == len(prompts[request]) + max_tokens:
                cache.close(running.pop(request))
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


prompts = [[*range(10), *rng.integers(0, VOCAB, 5).tolist()] for _ in range(4)]
results = []
for title, caching in (("a shared beginning", True), ("the same again", True), ("no prefix caching", False)):
    if not caching:
        cache = Cache(spec, num_blocks=12, block_size=BLOCK, prefix_caching=False)
    print(f"{title}:")
    results.append(generate(prompts, 8))
print(*results[0], f"the same tokens each time: {results[0] == results[1] == results[2]}", sep="\n")
