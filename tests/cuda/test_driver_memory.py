"""A card's memory by calls of a fake driver: pages committed, released behind a fence, handles counted."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_driver import OUT_OF_MEMORY, UNKNOWN, FakeDriver, fake_driver

from quire import Cache
from quire.attention import reference_attention
from quire.devices.cuda.driver_ahead import MapAhead
from quire.devices.cuda.driver_calls import CudaDriver, virtual_memory_reason
from quire.devices.cuda.driver_memory import DriverMemory
from quire.devices.cuda.driver_range import DriverRange
from quire.errors import ArgumentError, BackendError, CapacityError, DeviceLostError
from quire.memory import PagedStorage
from quire.memory.device_buffer import DeviceBuffer
from quire.spec import KVSpec

PAGE = 4096
CPU = torch.device("cpu")
LOW_WATER = 2


@pytest.fixture
def driver() -> FakeDriver:
    gc.collect()  # ranges of an earlier test are freed by the fake driver that made them
    return fake_driver(PAGE, 64 * PAGE)


@pytest.fixture
def memory(driver: FakeDriver) -> Any:
    made = DriverMemory(CPU)
    made.pool.low_water, made.collects_soon = LOW_WATER, False
    yield made
    made.ahead.close()
    made.behind.close()
    assert driver.fault == ""


def pages_of(found: DriverRange) -> list[int]:
    """The pages with memory."""
    return [
        page
        for page in range(found.max_bytes // PAGE)
        if found.committed_bytes(page * PAGE, (page + 1) * PAGE)
    ]


def test_a_page_gets_zeros_where_it_is_committed_and_no_memory_elsewhere(
    driver: FakeDriver, memory: DriverMemory
) -> None:
    made = memory.reserve(10 * PAGE - 5)
    assert made.max_bytes == 10 * PAGE
    assert driver.num_handles == 0
    assert made.commit(PAGE + 7, 3 * PAGE + 1)
    assert pages_of(made) == [1, 2, 3]
    elements = made.tensor(torch.float32)
    assert elements.numel() == 10 * PAGE // 4
    assert (elements[PAGE // 4 : PAGE] == 0).all()  # a new handle's bytes are 0xFF
    elements[PAGE // 4 : PAGE] = 3.0
    assert made.commit(0, 5 * PAGE)
    assert (elements[PAGE // 4 : PAGE] == 3.0).all()
    assert (elements[: PAGE // 4] == 0).all()
    assert driver.calls("cuMemSetAccess") == 3  # one for each run: 1 to 3, then 0, then 4
    assert made.committed_bytes() == 5 * PAGE == memory.pool.num_in_use * PAGE
    made.close()
    made.close()
    with pytest.raises(ArgumentError, match="open range"):
        made.tensor(torch.float32)
    assert driver.num_mappings == 0
    assert driver.num_handles == LOW_WATER


def test_addresses_live_as_long_as_a_tensor_of_them(driver: FakeDriver, memory: DriverMemory) -> None:
    made = memory.reserve(4 * PAGE)
    made.commit(0, PAGE)
    view = made.tensor(torch.bfloat16).as_strided((2, 3), (8, 1), 4)
    assert view.data_ptr() == made.address + 8
    made.close()
    del made
    memory.collect()
    assert driver.num_ranges == 1
    del view
    memory.collect()
    assert driver.num_ranges == 0


def test_only_whole_pages_are_released_and_their_handles_are_used_again(
    driver: FakeDriver, memory: DriverMemory
) -> None:
    made = memory.reserve(8 * PAGE)
    made.commit(0, 8 * PAGE)
    made.tensor(torch.uint8).fill_(9)
    made.release(PAGE - 1, 4 * PAGE + 5)
    assert pages_of(made) == [0, 4, 5, 6, 7]
    assert memory.pool.num_free == LOW_WATER
    created = driver.calls("cuMemCreate")
    made.commit(2 * PAGE, 4 * PAGE)
    assert driver.calls("cuMemCreate") == created
    assert (made.tensor(torch.uint8)[2 * PAGE : 4 * PAGE] == 0).all()
    assert (made.tensor(torch.uint8)[4 * PAGE :] == 9).all()
    made.release(0, 0)
    with pytest.raises(ArgumentError, match="inside"):
        made.release(0, 9 * PAGE)
    made.close()


def test_memory_goes_only_behind_the_step_that_may_use_it(driver: FakeDriver, memory: DriverMemory) -> None:
    made = memory.reserve(4 * PAGE)
    made.commit(0, 4 * PAGE)
    made.tensor(torch.uint8).fill_(5)
    driver.run(made.address, 4 * PAGE)
    made.release(0, 2 * PAGE)
    made.release(3 * PAGE, 4 * PAGE)
    assert pages_of(made) == [0, 1, 2, 3]
    made.commit(PAGE, 2 * PAGE)  # page 1 is wanted again: it stays, with its bytes
    assert (made.tensor(torch.uint8)[PAGE : 2 * PAGE] == 5).all()
    driver.finish()
    assert pages_of(made) == [1, 2]
    assert (made.tensor(torch.uint8)[PAGE : 3 * PAGE] == 5).all()
    made.close()


def test_a_page_released_again_waits_for_the_later_step(driver: FakeDriver, memory: DriverMemory) -> None:
    made = memory.reserve(2 * PAGE)
    made.commit(0, PAGE)
    driver.run(made.address, PAGE)
    made.release(0, PAGE)
    first = memory._waiting[0][0]
    made.commit(0, PAGE)
    driver.run(made.address, PAGE)
    made.release(0, PAGE)
    first.wait()  # of the first kernel alone
    memory.collect()
    assert pages_of(made) == [0]
    driver.finish()
    assert pages_of(made) == []
    made.close()


def test_an_idle_engine_gives_memory_back_without_another_call(
    driver: FakeDriver, memory: DriverMemory
) -> None:
    memory.collects_soon = True
    made = memory.reserve(4 * PAGE)
    made.commit(0, 4 * PAGE)
    driver.run(made.address, 4 * PAGE)
    made.release(0, 4 * PAGE)
    memory.behind.join()
    assert driver.num_mappings == 0
    made.close()


def test_a_full_card_waits_for_what_is_leaving_before_it_refuses(
    driver: FakeDriver, memory: DriverMemory
) -> None:
    made, other = memory.reserve(64 * PAGE), memory.reserve(64 * PAGE)
    made.commit(0, 64 * PAGE)
    before = driver.state
    with pytest.raises(CapacityError, match="gives no memory"):
        other.commit(0, PAGE)
    assert driver.state == before
    assert (made.committed_bytes(), other.committed_bytes()) == (64 * PAGE, 0)
    driver.run(made.address, 64 * PAGE)
    made.release(0, 3 * PAGE)
    other.commit(0, 2 * PAGE)
    assert pages_of(other) == [0, 1]
    assert 0 not in pages_of(made)
    # Pages of the range itself may be the ones that leave: they are taken again.
    driver.run(made.address, 64 * PAGE)
    made.release(3 * PAGE, 64 * PAGE)
    other.commit(0, 30 * PAGE)
    made.commit(3 * PAGE, 34 * PAGE)
    assert made.committed_bytes() >= 31 * PAGE
    made.close()
    other.close()


def test_a_limit_lowered_while_serving_gives_memory_to_other_processes(
    driver: FakeDriver, memory: DriverMemory
) -> None:
    made = memory.reserve(32 * PAGE)
    made.commit(0, 16 * PAGE)
    memory.set_limit(10 * PAGE)
    assert driver.bytes_taken == 16 * PAGE  # pages in use stay
    with pytest.raises(CapacityError, match="got 16 of 10"):
        made.commit(16 * PAGE, 17 * PAGE)
    made.release(4 * PAGE, 16 * PAGE)
    memory.collect()
    assert driver.bytes_taken == memory.bytes_created == (4 + LOW_WATER) * PAGE
    made.commit(4 * PAGE, 10 * PAGE)
    with pytest.raises(CapacityError, match="got 10 of 10"):
        made.commit(0, 11 * PAGE)
    made.release(8 * PAGE, 10 * PAGE)
    memory.trim()
    assert driver.bytes_taken == 8 * PAGE
    memory.set_limit(None)
    made.commit(0, 32 * PAGE)
    with pytest.raises(ArgumentError, match="at least 0"):
        memory.set_limit(-PAGE)
    made.close()


def test_free_bytes_and_total_are_the_card_s(driver: FakeDriver, memory: DriverMemory) -> None:
    assert (memory.total_bytes(), memory.free_bytes()) == (64 * PAGE, 64 * PAGE)
    made = memory.reserve(1 << 40)
    made.commit(0, 3 * PAGE)
    assert memory.free_bytes() == 61 * PAGE
    memory.pool.refill()
    assert memory.pool.num_free >= LOW_WATER
    assert memory.free_bytes() == 61 * PAGE
    made.close()


def scenario(memory: DriverMemory, driver: FakeDriver) -> list[Callable[[], None]]:
    """Changes of two ranges, one by one."""
    one, two = memory.reserve(8 * PAGE), memory.reserve(8 * PAGE)
    one.commit(0, PAGE)
    driver.finish()

    def under_a_step() -> None:
        if not one._release_of[0]:  # no step uses what is leaving
            driver.run(one.address, 8 * PAGE)
        one.release(0, 2 * PAGE)

    def new_range() -> None:
        memory.reserve(4 * PAGE).close()

    return [
        lambda: two.commit(0, 4 * PAGE),  # type: ignore[list-item]
        lambda: one.commit(0, 8 * PAGE),  # type: ignore[list-item]
        lambda: two.release(PAGE, 3 * PAGE),
        new_range,
        under_a_step,
        lambda: one.commit(PAGE, 3 * PAGE),  # type: ignore[list-item]
        lambda: memory.set_limit(9 * PAGE),
        memory.trim,
        one.close,
        two.close,
    ]


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
def test_each_call_that_fails_leaves_everything_as_before(code: int) -> None:
    """Each call of each change fails once, from the same state; then the change is made, and all memory goes back."""
    step, at, num_refused = 0, 1, 0
    while True:
        gc.collect(1)
        driver = fake_driver(PAGE, 64 * PAGE)
        memory = DriverMemory(CPU)
        memory.pool.low_water, memory.collects_soon = LOW_WATER, False
        changes = scenario(memory, driver)
        if step == len(changes):
            break
        for change in changes[:step]:
            change()
        before = memory.pool.num_in_use, driver.num_mappings
        driver.fail(at, code)
        try:
            changes[step]()
            num_failed = driver.num_failed
        except (CapacityError, BackendError):
            num_failed = 1
            num_refused += 1
            assert (memory.pool.num_in_use, driver.num_mappings) == before
            changes[step]()
        assert driver.num_handles == memory.pool.num_created
        driver.fail(0)
        for change in changes[step + 1 :]:
            change()
        memory.wait()
        memory.trim()
        assert driver.fault == ""
        assert (driver.num_handles, driver.num_mappings, driver.bytes_taken) == (0, 0, 0)
        changes.clear()
        del change
        gc.collect(1)
        memory.collect()
        assert driver.num_ranges == 0
        step, at = (step, at + 1) if num_failed else (step + 1, 1)
    assert num_refused > 20


def test_a_fault_of_the_card_ends_every_call(driver: FakeDriver) -> None:
    memory = DriverMemory(CPU)
    made = memory.reserve(2 * PAGE)
    with pytest.raises(DeviceLostError, match=r"ILLEGAL_ADDRESS.*engine has to end"):
        memory.copy(made.address, made.address + PAGE, 8)
    assert "without access" in driver.fault
    with pytest.raises(DeviceLostError):
        made.commit(0, PAGE)
    made.close()


def test_unmapping_without_a_fence_is_found_by_the_fake_driver(driver: FakeDriver) -> None:
    """The law test can fail: the same release without its fence is a fault."""
    memory = DriverMemory(CPU)
    made = memory.reserve(PAGE)
    made.commit(0, PAGE)
    driver.run(made.address, PAGE)
    with pytest.raises(DeviceLostError):
        memory.driver.unmap(made.address, PAGE)
    assert "under a running kernel" in driver.fault


def test_a_call_that_the_driver_refuses_names_itself(memory: DriverMemory) -> None:
    with pytest.raises(BackendError, match=r"accept cuMemUnmap on card 0, got error 1"):
        memory.driver.unmap(PAGE, PAGE)
    with pytest.raises(BackendError, match=r"cuDeviceGet on card 3"):
        CudaDriver(3)
    assert virtual_memory_reason(3) is not None
    assert virtual_memory_reason(0) is None


def test_pieces_are_copied_by_rows_and_blocks_within_the_card(memory: DriverMemory) -> None:
    made = memory.reserve(2 * PAGE)
    made.commit(0, 2 * PAGE)
    rng = np.random.default_rng(1)
    payload = rng.integers(0, 256, 100, np.uint8)
    base = made.address
    # offset, address, rows, bytes of a row, stride
    pieces = np.array(
        [[0, base + 16, 3, 20, 64], [60, base + PAGE, 1, 25, 0], [85, base + 1000, 3, 5, 5]], np.int64
    )
    memory.copy_pieces(payload, pieces, True)
    held = made.tensor(torch.uint8).numpy()
    assert (held[16:36] == payload[:20]).all()
    assert (held[80:100] == payload[20:40]).all()
    assert (held[1000:1015] == payload[85:]).all()
    assert held[36:80].max() == 0
    back = np.zeros_like(payload)
    memory.copy_pieces(back, pieces, False)
    assert (back == payload).all()
    pool = made.tensor(torch.float32)[:96].view(2, 3, 1, 4, 4)
    pool[:, 0] = 7.0
    memory.copy_blocks([pool], np.array([[0, 2, 3]]))
    assert (pool[:, 2, :, :3] == 7.0).all()
    assert (pool[:, 2, :, 3] != 7.0).any()
    made.close()


def test_a_thread_maps_ahead_and_a_card_without_memory_does_not_end_it(
    driver: FakeDriver, memory: DriverMemory
) -> None:
    made = memory.reserve(200 * PAGE)
    made.commit_ahead(0, 2 * PAGE)
    made.commit_ahead(0, 200 * PAGE)  # more than the card has
    made.commit_ahead(4 * PAGE, 5 * PAGE)
    memory.ahead.join()
    assert pages_of(made) == [0, 1, 4]
    calls = driver.calls("cuMemMap")
    made.commit(0, 2 * PAGE)
    assert driver.calls("cuMemMap") == calls
    made.close()
    memory.ahead.join()


def test_a_queue_is_worked_off_in_order_and_may_be_closed_and_used_again() -> None:
    ahead, seen = MapAhead(), []
    ahead.join()
    ahead.close()
    for number in range(5):
        ahead.want(lambda number=number: seen.append((number, threading.current_thread().name)))
    ahead.join()
    assert seen == [(number, "quire-map-ahead") for number in range(5)]
    ahead.close()
    ahead.want(lambda: seen.append((9, "")))
    ahead.close()
    assert seen[-1] == (9, "")


def test_a_paged_storage_backs_a_block_before_a_step_writes_it(
    driver: FakeDriver, memory: DriverMemory
) -> None:
    """Blocks of a quarter of a page in each of two layers: a page goes with the last of its blocks."""
    spec = KVSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=32, dtype="float32")
    storage = PagedStorage(spec, 24, 4, max_blocks=32, device=memory)
    assert storage.block_bytes == 2 * PAGE // 4
    cache = Cache(spec, num_blocks=24, block_size=4, prefix_caching=False)
    a = cache.open(list(range(30)))
    plan = cache.reserve([a], [30])
    assert plan is not None
    storage.prepare(plan, np.array([a.id]))
    memory.ahead.join()
    assert sorted(a.block_table(0)) == list(range(8))
    assert memory.pool.num_in_use == 2 * 3  # two pages of eight blocks, and one ahead, in each layer
    view = storage.view(1)
    reference_attention.write(
        view, torch.ones(30, 1, 32), torch.ones(30, 1, 32), torch.from_numpy(plan.slot_mapping)
    )
    storage.give_back([0, 1, 3])
    assert memory.pool.num_in_use == 2 * 3
    storage.give_back([2])
    assert memory.pool.num_in_use == 2 * 2
    assert (view.k[4:7] == 1).all()
    memory.set_limit(memory.pool.num_in_use * PAGE)
    b = cache.open(list(range(50)))
    plan = cache.reserve([b], [50])
    assert plan is not None
    taken = memory.pool.num_in_use
    with pytest.raises(CapacityError):
        storage.prepare(plan, np.array([b.id]))
    assert memory.pool.num_in_use <= taken
    memory.set_limit(None)
    storage.prepare(plan, np.array([b.id]))
    storage.fill(2.0)
    assert memory.pool.num_in_use == 2 * 6
    storage.resize(6)
    assert memory.pool.num_in_use == 2 * 2
    storage.resize(32)
    assert storage.commit_ahead(0, 32) is False  # memory was given back before
    storage.close()
    assert driver.num_mappings == 0


def test_a_buffer_of_the_driver_s_memory_is_whole_or_refused(
    driver: FakeDriver, memory: DriverMemory
) -> None:
    buffer = DeviceBuffer(memory, 5 * PAGE + 1)
    buffer.tensor.fill_(3)
    assert memory.pool.num_in_use == 6
    with pytest.raises(CapacityError):
        DeviceBuffer(memory, 64 * PAGE)
    assert memory.pool.num_in_use == 6
    buffer.close()
    assert driver.num_mappings == 0
