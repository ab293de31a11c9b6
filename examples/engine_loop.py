"""An engine in one page: continuous batching on `quire.Cache`, without `quire.LLM` and without torch.

The "model" is one layer of causal attention in numpy with random weights. Its K and V live in two arrays addressed
by slot. The cache decides which slot belongs to which token. Run: python examples/engine_loop.py

It ends for any prompts, because of two rules (docs/engine-builders.md, "Admission that always ends"):
    1  A request that does not fit in the whole cache is refused before it starts.
    2  A request is admitted only if its whole prompt fits in addition to all tokens that running ones still have to
       compute. So the step after an admission always finds its blocks, and the oldest running request computes in every
       step.
"""

import numpy as np

from quire import Cache, KVSpec

VOCAB, DIM, NUM_BLOCKS, BLOCK, BUDGET = 64, 16, 12, 4, 12  # BUDGET: tokens computed in one step, at most
rng = np.random.default_rng(0)
embed, w_out = rng.normal(size=(VOCAB, DIM)), rng.normal(size=(DIM, VOCAB))
place = rng.normal(size=(NUM_BLOCKS * BLOCK, DIM))
w_q, w_k, w_v = rng.normal(size=(3, DIM, DIM)) / 2
spec = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=DIM)
keys, values = np.full((2, NUM_BLOCKS, BLOCK, DIM), np.nan)  # unwritten slots must never be read


def new_cache(prefix_caching=True):
    return Cache(spec, num_blocks=NUM_BLOCKS, block_size=BLOCK, prefix_caching=prefix_caching)


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


def admit(cache, tokens, running):
    """An open sequence of these tokens, or None: its prompt does not fit with the rest of the others."""
    seq = cache.open(tokens)  # takes the longest known prefix, and no block beyond it
    everyone = [*running, seq]
    rest = [one.num_tokens - one.num_computed_tokens for one in everyone]
    if cache.num_blocks_needed(everyone, rest) <= cache.num_available_blocks():
        return seq
    cache.close(seq)
    return None


def generate(cache, prompts, max_tokens, log=print):
    """Greedy continuations: admit, compute prompts in chunks, decode, preempt when there is no room, finish."""
    for prompt in prompts:
        if cache.num_blocks_for(len(prompt) + max_tokens) > cache.num_blocks:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_tokens} new ones never fit in {cache}"
            )
    known = [list(prompt) for prompt in prompts]
    waiting, running = list(range(len(prompts))), {}  # running: request -> sequence, the oldest first
    while waiting or running:
        while waiting and (seq := admit(cache, known[waiting[0]], running.values())):
            request = waiting.pop(0)
            running[request] = seq
            log(f"  request {request}: {seq.num_cached_tokens} of its {seq.num_tokens} tokens are cached")
        batch, left = [], BUDGET
        for request, seq in running.items():
            start = seq.num_computed_tokens
            positions = np.arange(start, min(start + left, seq.num_tokens))
            if len(positions):
                batch.append((request, seq, positions))
                left -= len(positions)
        plan = cache.reserve([seq for _, seq, _ in batch], [len(positions) for *_, positions in batch])
        if (
            plan is None
        ):  # the newest starts over later, and finds its blocks again if no other sequence needed them
            request, seq = running.popitem()
            cache.close(seq)
            waiting.insert(0, request)
            log(f"  request {request}: preempted")
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


if __name__ == "__main__":
    prompts = [[*range(10), *rng.integers(0, VOCAB, 5).tolist()] for _ in range(4)]
    cache, results = new_cache(), []
    for title in ("a shared beginning", "the same again"):
        print(f"{title}:")
        results.append(generate(cache, prompts, 8))
    print("no prefix caching:")
    results.append(generate(new_cache(prefix_caching=False), prompts, 8))
    print(*results[0], f"the same tokens each time: {results[0] == results[1] == results[2]}", sep="\n")
    print("nothing in common:")
    generate(new_cache(), rng.integers(0, VOCAB, (6, 30)).tolist(), 8)
