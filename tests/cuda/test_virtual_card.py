"""Rows of a card's memory (`storage="virtual"`) on the fake driver: the laws of the host's rows, and those of a card.

Every address without memory is PROT_NONE, so a step that reaches one ends the process.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import hf_case
from support.cache_argument import CACHE
from support.driver_device import DriverDevice, driver_device
from support.fake_driver import OUT_OF_MEMORY, UNKNOWN, FakeDriver
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected
from support.sequences_case import NAN, Sequences
from support.wide_model import wide_model
from transformers import DynamicCache

from quire import LLM, Cache, SamplingParams
from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.devices.cuda.torch_memory import TorchMemory
from quire.errors import ArgumentError, BackendError, CapacityError
from quire.hf import QuireCache
from quire.memory import VirtualStorage
from quire.memory.virtual.page_sizes import virtual_block_size
from quire.memory.virtual.window_ring import WindowRing
from quire.spec import KVSpec, LayerSpec, Span

PAGE = 4096
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
FULL, WINDOW = Span(), Span("window", 10)
# A token is 1 KiB of keys and of values: blocks of 4 tokens are one page each.
UNIFORM = KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=128, dtype="float32")
MIXED = KVSpec(
    layers=(
        LayerSpec(WINDOW, 2, 256, 512),
        LayerSpec(FULL, 4, 512, 256),
        LayerSpec(WINDOW, 2, 256, 512),
        LayerSpec(FULL, 4, 512, 256, shares_kv_with=1),
        LayerSpec(FULL, 4, 512, 256),
    ),
    dtype="bfloat16",
)


@pytest.fixture
def card() -> Iterator[tuple[DriverDevice, FakeDriver]]:
    gc.collect()
    with driver_device(PAGE) as made:
        yield made


def make(device: DriverDevice, spec: KVSpec, num_blocks: int, **options: Any) -> tuple[Cache, VirtualStorage]:
    cache_options = {"prefix_caching": options.pop("prefix_caching", True)}
    options = {"max_model_len": 64, "max_num_seqs": 6, "max_blocks": num_blocks, **options}
    storage = VirtualStorage(spec, num_blocks, 4, device=device, **options)
    return Cache(spec, num_blocks=num_blocks, block_size=4, **cache_options), storage


def row_addresses(storage: VirtualStorage, sequence: Any, layer: int = 0) -> list[int]:
    """Addresses of the keys of each block of a sequence's row."""
    row = storage.row_of(sequence.id)
    assert row is not None
    keys = storage.view(layer).k[row]
    return [keys[:, start:].data_ptr() for start in range(0, sequence.num_computed_tokens, 4)]


@pytest.mark.parametrize(("spec", "step_tokens"), [(UNIFORM, None), (MIXED, None), (MIXED, 8)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (1, 2, 3))])
def test_rows_hold_what_a_recompute_would_write(
    card: tuple[DriverDevice, FakeDriver], spec: KVSpec, step_tokens: int | None, seed: int
) -> None:
    """Hits, copies, forks, rewinds, evictions, adopted rows; each step runs on the card until the next needs it."""
    device, driver = card
    rng = random.Random(seed)
    options = {"step_tokens": step_tokens, "max_model_len": 160} if step_tokens else {}
    cache, storage = make(device, spec, 40 * len(spec.groups), prefix_caching=step_tokens is None, **options)
    assert any(isinstance(places, WindowRing) for places in storage._places) == (step_tokens is not None)
    storage.fill(NAN)
    work = Sequences(cache, storage)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(5, 30))] for _ in range(3)]
    for _ in range(80):
        choice = rng.random()
        if choice < 0.3 and len(work.open) < 6:
            prompt = rng.choice(prompts)
            work.open.append(cache.open([*prompt[: rng.randrange(2, len(prompt))], rng.randrange(4)]))
        elif choice < 0.4 and work.open:
            work.close(rng.choice(work.open))
        elif choice < 0.5 and work.open and len(work.open) < 6:
            parent = rng.choice(work.open)
            if parent.num_computed_tokens == parent.num_tokens:
                parent.append([rng.randrange(4)])
            work.open.append(cache.fork(parent))
        elif choice < 0.55:
            taken = {int(u) for s in work.open for g in range(len(spec.groups)) for u in s.block_table(g)}
            free = [u for u in range(storage.num_blocks) if u not in taken]
            if step_tokens is not None:  # without a prefix cache a free block has no content to lose
                storage.give_back(rng.sample(free, len(free) // 2))
        elif work.open:
            some = rng.sample(work.open, rng.randrange(1, len(work.open) + 1))
            for sequence in some:
                if sequence.num_computed_tokens == sequence.num_tokens:
                    sequence.append([rng.randrange(4) for _ in range(rng.randrange(1, 4))])
            some = [sequence for sequence in some if sequence.num_tokens < 50]
            most = step_tokens or 99
            num_new = [rng.randrange(1, min(most, s.num_tokens - s.num_computed_tokens) + 1) for s in some]
            if some and work.step(some, num_new, lookahead=0 if step_tokens else rng.randrange(3)):
                work.check_rows(some)
                places = storage._ranges[0]
                driver.run(places.address, places.num_bytes)
        assert driver.fault == ""
        storage.check()
        cache.check()
    driver.finish()
    storage.close()


def test_a_prefix_is_one_handle_at_two_addresses(card: tuple[DriverDevice, FakeDriver]) -> None:
    device, driver = card
    cache, storage = make(device, UNIFORM, 16)
    work = Sequences(cache, storage)
    a = cache.open(list(range(20)))
    assert work.step([a], [20])
    committed = storage.bytes_committed
    assert committed == 5 * storage.block_bytes == 5 * 6 * PAGE
    b = cache.open([*range(16), 99, 98])
    assert b.num_cached_tokens == 16
    assert work.step([b], [2])
    assert storage.bytes_committed == committed + storage.block_bytes
    ours, others = row_addresses(storage, a), row_addresses(storage, b)
    assert len({*ours, *others}) == 10
    handles = [[driver.handle_at(address) for address in row] for row in (ours, others)]
    assert handles[0][:4] == handles[1][:4]
    assert handles[0][4] != handles[1][4]
    assert min(*handles[0], *handles[1]) > 0
    storage.view(1).k[storage.row_of(a.id), 0, 3, 5] = 1234.0
    assert float(storage.view(1).k[storage.row_of(b.id), 0, 3, 5]) == 1234.0
    storage.close()


def test_torch_s_own_attention_reads_a_row(card: tuple[DriverDevice, FakeDriver]) -> None:
    device, _ = card
    cache, storage = make(device, UNIFORM, 16)
    storage.fill(NAN)
    sequence = cache.open(list(range(30)))
    plan = cache.reserve([sequence], [30])
    assert plan is not None
    ((block_tables, slot_mapping),) = storage.prepare(plan, np.array([sequence.id]))
    rng = torch.Generator().manual_seed(1)
    k, v, query = (torch.randn(30, heads, 128, generator=rng) for heads in (2, 2, 4))
    view = storage.view(2)
    reference_attention.write(view, k, v, torch.from_numpy(slot_mapping))
    row = storage.row_of(sequence.id)
    keys, values = view.k[row, :, :30], view.v[row, :, :30]
    assert keys.transpose(0, 1).is_contiguous()
    got = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    attention = attention_batch(plan.query_start, plan.context_lengths, block_tables, view.block_size)
    want = reference_attention.run(view, query, attention, AttentionOptions(scale=128**-0.5))
    torch.testing.assert_close(got[0].transpose(0, 1), want)
    storage.close()


def test_a_block_leaves_only_behind_the_step_that_may_read_it(card: tuple[DriverDevice, FakeDriver]) -> None:
    device, driver = card
    cache, storage = make(device, UNIFORM, 16, prefix_caching=False)
    work = Sequences(cache, storage)
    a, b = cache.open(list(range(20))), cache.open([7])
    work.open.append(a)
    assert work.step([a, b], [20, 1])
    addresses = row_addresses(storage, a)
    driver.run(storage._ranges[0].address, storage._ranges[0].num_bytes)
    work.close(a)
    storage.forget(np.array(work.closed))
    storage.give_back(np.setdiff1d(np.arange(16), b.block_table(0)))
    assert all(driver.handle_at(address) > 0 for address in addresses)
    committed = storage.bytes_committed
    driver.finish()
    assert storage.bytes_committed == storage.block_bytes < committed
    assert not any(driver.handle_at(address) for address in addresses)
    storage.close()


def test_another_block_is_mapped_over_the_old_one_when_the_step_has_ended(
    card: tuple[DriverDevice, FakeDriver],
) -> None:
    device, driver = card
    cache, storage = make(device, UNIFORM, 16, max_num_seqs=1)
    work = Sequences(cache, storage)
    a = cache.open(list(range(20)))
    work.open.append(a)
    assert work.step([a], [20])
    before = [driver.handle_at(address) for address in row_addresses(storage, a)]
    work.close(a)
    driver.run(storage._ranges[0].address, storage._ranges[0].num_bytes)
    b = cache.open([*range(8), *range(40, 52)])
    assert work.step([b], [b.num_tokens - b.num_cached_tokens])  # waits for the step
    after = [driver.handle_at(address) for address in row_addresses(storage, b)]
    assert after[:2] == before[:2]
    assert not {*after[2:]} & {*before[2:]}
    work.check_rows([b])
    storage.close()


def test_a_row_that_was_parked_is_adopted_without_a_call(card: tuple[DriverDevice, FakeDriver]) -> None:
    device, driver = card
    cache, storage = make(device, UNIFORM, 32)
    work = Sequences(cache, storage)
    a = cache.open(list(range(22)))
    work.open.append(a)
    assert work.step([a], [22])
    row = storage.row_of(a.id)
    work.close(a)
    b = cache.open([*range(20), 77, 78])
    calls = [driver.calls(name) for name in ("cuMemMap", "cuMemSetAccess", "cuMemUnmap")]
    assert work.step([b], [b.num_tokens - b.num_cached_tokens])
    assert storage.row_of(b.id) == row
    # The sixth block alone, in six layer buffers: in the heap and in the row, over the block of `a`.
    now = [driver.calls(name) for name in ("cuMemMap", "cuMemSetAccess", "cuMemUnmap")]
    assert np.subtract(now, calls).tolist() == [12, 12, 6]
    work.check_rows([b], [row])  # type: ignore[list-item]
    storage.close()


def test_access_is_set_once_for_a_run(card: tuple[DriverDevice, FakeDriver]) -> None:
    device, driver = card
    cache, storage = make(device, UNIFORM, 16)
    work = Sequences(cache, storage)
    a = cache.open(list(range(40)))
    assert work.step([a], [40])
    assert driver.calls("cuMemMap") == 2 * 6 * 10
    assert driver.calls("cuMemSetAccess") == 2 * 6
    storage.close()


def test_payloads_go_through_the_driver_s_copies(card: tuple[DriverDevice, FakeDriver]) -> None:
    device, driver = card
    cache, storage = make(device, UNIFORM, 16)
    work = Sequences(cache, storage)
    a = cache.open(list(range(10)))
    assert work.step([a], [10])
    payload = storage.read_blocks([a.block_table(0)], 10)
    b = cache.open(list(range(100, 110)))
    plan = cache.reserve([b], [10])
    assert plan is not None
    storage.run_copies(plan)
    storage.write_blocks([b.block_table(0)], payload, 10)
    assert (storage.read_blocks([b.block_table(0)], 10) == payload).all()
    assert driver.calls("cuMemcpyDtoHAsync") + driver.calls("cuMemcpy2DAsync") > 0
    storage.close()


def changes_of(
    device: DriverDevice, driver: FakeDriver
) -> tuple[VirtualStorage, Sequences, list[Callable[[], None]]]:
    """Steps of three sequences one by one: hit, copy-on-write, growth, adoption, memory given back, fewer blocks."""
    cache, storage = make(device, MIXED, 60)
    work = Sequences(cache, storage)
    found: dict[str, Any] = {}

    def step(name: str, prompt: list[int]) -> Callable[[], None]:
        """A change that opens and computes a sequence: planned once, prepared as often as it is refused."""

        def prepare() -> None:
            if name not in found:
                found[name] = cache.open(prompt)
                work.open.append(found[name])
                num_new = found[name].num_tokens - found[name].num_cached_tokens
                found[name, "plan"] = cache.reserve([found[name]], [num_new])
            storage.prepare(found[name, "plan"], np.array([found[name].id]))

        return prepare

    def close_first() -> None:
        if found["a"] in work.open:
            cache.commit(found["a"], 18)
            work.close(found["a"])
            storage.forget(np.array(work.closed))
        driver.run(storage._ranges[0].address, storage._ranges[0].num_bytes)

    def give_back() -> None:
        taken = {int(u) for s in work.open for g in range(len(MIXED.groups)) for u in s.block_table(g)}
        storage.give_back([u for u in range(40, 60) if u not in taken])

    return (
        storage,
        work,
        [
            step("a", list(range(18))),
            close_first,
            step("b", [*range(16), *range(50, 62)]),
            step("c", [*range(10), *range(70, 82)]),
            give_back,
            storage.close,
        ],
    )


@pytest.mark.parametrize(
    ("code", "every"),
    [
        (UNKNOWN, 17),  # any other refusal ends the change; without memory, parked rows make way first
        pytest.param(UNKNOWN, 2, marks=pytest.mark.ci),
        pytest.param(OUT_OF_MEMORY, 1, marks=pytest.mark.ci),
    ],
)
def test_each_call_that_fails_leaves_the_rows_as_before(code: int, every: int) -> None:
    """Each call of each change (or every n-th) fails once, from the same state; then the change is made again, and all
    memory goes back."""
    step, at, num_refused = 0, 1, 0
    while True:
        gc.collect(1)
        with driver_device(PAGE) as (device, driver):
            storage, work, changes = changes_of(device, driver)
            if step == len(changes):
                storage.close()
                break
            for change in changes[:step]:
                change()
            handles_at = mapped(storage, driver)
            driver.fail(at, code)
            try:
                changes[step]()
                num_failed = driver.num_failed
            except (CapacityError, BackendError):
                num_failed = 1
                num_refused += 1
                storage.check()
                now = mapped(storage, driver)
                open_rows = [*storage._rows.row_of.values()]
                same = open_rows_of(storage, handles_at, open_rows)
                assert step == len(changes) - 1 or same == open_rows_of(storage, now, open_rows)
                changes[step]()
            driver.fail(0)
            for change in changes[step + 1 :]:
                change()
            driver.finish()
            assert driver.fault == ""
            del storage, work, changes
        step, at = (step, at + every) if num_failed else (step + 1, 1)
    assert num_refused >= (3 if every == 17 else 10)


def mapped(storage: VirtualStorage, driver: FakeDriver) -> dict[int, int]:
    """Handle by address of the mapped pages of all rows."""
    found: dict[int, int] = {}
    for address_range in storage._ranges:
        found |= driver.mapped(address_range.address, address_range.num_bytes)
    return found


def open_rows_of(storage: VirtualStorage, handles_at: dict[int, int], rows: list[int]) -> dict[int, int]:
    """The part of `handles_at` in rows of open sequences."""
    kept: dict[int, int] = {}
    for layer in range(len(MIXED.layers)):
        for pool in (storage.view(layer).k, storage.view(layer).v):
            for row in rows:
                first = pool[row].data_ptr()
                stop = first + pool.stride(0) * pool.element_size()
                kept |= {page: handle for page, handle in handles_at.items() if first <= page < stop}
    return kept


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_tokens_are_those_of_generate(name: str, card: tuple[DriverDevice, FakeDriver]) -> None:
    """Cold, in chunks, from hits; and after memory was given back and the budget was lowered while serving."""
    device, driver = card
    model, tokens, _ = expected(name)
    options: dict[str, Any] = {
        "block_size": 4,
        "max_batch_tokens": 11,
        "max_num_seqs": 4,
        "kv_memory": "4MiB",
    }
    for storage in ("virtual", "paged"):
        with LLM((model, None), backend="driver", storage=storage, **options) as llm:
            assert driver.num_handles == device.pool.num_free
            for _ in range(2):
                outputs = llm.generate(PROMPTS, GREEDY)
                assert [output.outputs[0].token_ids for output in outputs] == tokens
            stats = llm.stats()
            assert stats["hit_tokens"] > 0
            assert 0 < stats["kv_committed_bytes"] <= stats["kv_memory_bytes"]
            assert stats["kv_committed_bytes"] == device.pool.num_in_use * PAGE
            llm.trim()
            assert driver.bytes_taken == device.pool.num_free * PAGE
            llm.resize("2MiB")
            outputs = llm.generate(PROMPTS, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == tokens
            assert device.pool.num_in_use * PAGE <= 2 << 20
            llm.cache.check()
    assert driver.num_mappings == 0


@pytest.mark.parametrize("storage", ["virtual", "paged"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_a_full_card_ends_requests_with_an_error_or_right(
    storage: str, share: float, card: tuple[DriverDevice, FakeDriver]
) -> None:
    """A limit below the budget, as if another process had taken the rest."""
    device, _ = card
    model, tokens, _ = expected("qwen3")
    options: dict[str, Any] = {
        "block_size": 4,
        "max_batch_tokens": 64,
        "max_num_seqs": 4,
        "kv_memory": "8MiB",
    }
    with LLM((model, None), backend="driver", storage=storage, **options) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == tokens
        device.ahead.join()
        most = device.pool.num_in_use
        llm.flush()
        llm.trim()
        assert device.pool.num_in_use == 0
        device.set_limit(int(most * share) * PAGE)
        ids = [llm.engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        outputs: dict[str, Any] = {}
        while llm.engine.has_work:
            outputs.update({output.request_id: output for output in llm.engine.step()})
            llm.cache.check()
        errors = [outputs[request].error for request in ids]
        for request, want, error in zip(ids, tokens, errors, strict=True):
            assert error is not None or outputs[request].outputs[0].token_ids == want
            assert error is None or "pages of 4096 bytes on the card" in str(error)
        assert any(errors)
        assert all(errors) or share > 0.0
        assert not all(errors) or share < 0.8
        assert device.pool.num_created <= most * share
        device.set_limit(None)
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == tokens


def test_block_size_follows_the_card_s_page() -> None:
    qwen = KVSpec.uniform(num_layers=28, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert virtual_block_size(qwen, 2 << 20, page_bytes=2 << 20) == 1024
    tiny = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16")
    with pytest.raises(
        ArgumentError, match=r"whole pages of 2097152 bytes within 4096 tokens.*use storage paged"
    ):
        virtual_block_size(tiny, 2 << 20, page_bytes=2 << 20)
    gc.collect()
    with driver_device(2 << 20, 64 << 20) as (device, driver):
        spec = KVSpec.uniform(num_layers=2, num_kv_heads=8, head_dim=128, dtype="bfloat16")
        storage = VirtualStorage(spec, 6, 1024, max_model_len=4096, max_num_seqs=2, device=device)
        cache = Cache(spec, num_blocks=6, block_size=1024)
        a = cache.open(np.arange(1500))
        plan = cache.reserve([a], [1500])
        assert plan is not None
        storage.prepare(plan, np.array([a.id]))
        assert (
            driver.bytes_taken - device.pool.num_free * (2 << 20)
            == storage.bytes_committed
            == 2 * 4 * (2 << 20)
        )
        assert storage.row_tokens == 4096
        storage.close()


def test_tokens_on_pages_of_2_mib() -> None:
    """Pages as a card has them: a block of 512 tokens, one handle in each layer buffer."""
    model, tokens = wide_model()
    with driver_device(2 << 20, 256 << 20) as (device, driver):
        options: dict[str, Any] = {"kv_memory": "128MiB", "max_num_seqs": 4, "max_batch_tokens": 24}
        with LLM((model, None), backend="driver", storage="virtual", **options) as llm:
            assert llm.block_size == 512
            for _ in range(2):
                outputs = llm.generate(PROMPTS, GREEDY)
                assert [output.outputs[0].token_ids for output in outputs] == tokens
            assert llm.stats()["hit_tokens"] > 0
            assert driver.calls("cuMemCreate") < 64 + device.pool.low_water


def test_triton_s_kernels_touch_no_address_without_memory(card: tuple[DriverDevice, FakeDriver]) -> None:
    """Under the interpreter, on rows that end in the middle of a block, beside the references."""
    triton_language = pytest.importorskip("triton.language")
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(triton_language.zeros, InterpretedFunction):
        pytest.skip("this process imported triton before this folder chose its interpreter")
    from quire.devices.cuda.triton_attention import TritonAttention

    device, _ = card
    cache, storage = make(device, UNIFORM, 40, max_model_len=512)
    triton = TritonAttention(torch.device("cpu"))
    sequences = [
        cache.open(list(range(start, start + length))) for start, length in ((0, 37), (100, 5), (200, 1))
    ]
    lengths = [sequence.num_tokens for sequence in sequences]
    plan = cache.reserve(sequences, lengths)
    assert plan is not None
    ((entries, slot_mapping),) = storage.prepare(plan, np.array([sequence.id for sequence in sequences]))
    view, num = storage.view(1), sum(lengths)
    rng = torch.Generator().manual_seed(2)
    k, v, query = (torch.randn(num, heads, 128, generator=rng) for heads in (2, 2, 4))
    triton.write(view, k, v, torch.from_numpy(slot_mapping))
    attention = attention_batch(plan.query_start, plan.context_lengths, entries, view.block_size)
    options = AttentionOptions(scale=128**-0.5)
    want = reference_attention.run(view, query, attention, options)
    torch.testing.assert_close(triton.run(view, query, attention, options), want, rtol=1e-5, atol=1e-5)
    storage.close()


@pytest.mark.parametrize(
    ("name", "modes"), [("qwen3", ["greedy", "beams"]), ("gemma3_text", ["chunks", "continued"])]
)
def test_generate_runs_on_a_cache_of_mapped_rows(name: str, modes: list[str]) -> None:
    """transformers' own loop and the model's own forward, whose attention reads the rows in place."""
    model = hf_case.model_of(name)
    for mode in modes:
        want = hf_case.expected(name, mode)
        gc.collect()
        with driver_device(PAGE) as (_, driver):
            made: list[QuireCache] = []

            def make_cache(made: list[QuireCache] = made) -> QuireCache:
                made.append(hf_case.quire_cache(model, "virtual", backend="driver", max_length=256))
                return made[-1]

            assert hf_case.as_lists(hf_case.MODES[mode](model, make_cache)) == want, mode
            assert driver.calls("cuMemMap") > 0
            for cache in made:
                cache.reset()
            made.clear()
            gc.collect()


def test_a_cache_grows_without_a_copy_and_forks_copy_on_write(card: tuple[DriverDevice, FakeDriver]) -> None:
    device, driver = card
    model = hf_case.model_of("qwen3")
    cache = hf_case.quire_cache(model, "virtual", backend="driver", max_length=4096)
    ids = torch.randint(3, 120, (1, 300), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(input_ids=ids[:, :100], **{CACHE: cache})
        before, taken = cache.layers[0].keys, device.pool.num_in_use
        model(input_ids=ids[:, 100:], **{CACHE: cache})
        after = cache.layers[0].keys
        assert after.data_ptr() == before.data_ptr()
        assert device.pool.num_in_use > taken
        assert driver.calls("cuMemcpyDtoDAsync") == 0
        taken = device.pool.num_in_use
        fork = cache.fork()
        assert device.pool.num_in_use == taken
        theirs = fork.layers[0].keys
        assert theirs.data_ptr() != after.data_ptr()
        assert driver.handle_at(theirs.data_ptr()) == driver.handle_at(after.data_ptr()) > 0
        model(input_ids=ids[:, :1], **{CACHE: fork})
        assert driver.calls("cuMemcpyDtoDAsync") > 0  # of the pieces that the fork wrote to
        assert torch.equal(fork.layers[0].keys[:, :, :300], cache.layers[0].keys)
        twin = DynamicCache(config=model.config)
        model(input_ids=ids, **{CACHE: twin})
        torch.testing.assert_close(cache.layers[0].keys, twin.layers[0].keys, atol=1e-4, rtol=1e-4)
    del before, after, theirs
    fork.reset()
    cache.reset()


def test_other_devices_are_refused_by_name() -> None:
    memory = TorchMemory(torch.device("cpu"))
    assert not memory.has_virtual_rows
    with pytest.raises(BackendError, match="expected a card of CUDA, whose memory can be mapped, got cpu"):
        memory.mapped_memory()
    model = expected("qwen3")[0]
    with pytest.raises(ArgumentError, match='expected storage="paged" on backend'):
        LLM((model, None), backend="torch", storage="virtual", kv_memory="1MiB")
