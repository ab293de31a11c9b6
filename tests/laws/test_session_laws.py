"""No call about a session breaks a quota, a floor or another tenant's isolation, whatever else runs.

A random run of requests of three tenants and of all session calls over a fake engine with a tier: every request gets
the tokens it gets alone, and after each call the invariants of cache, pins and sessions hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens, full_spec, window_spec
from support.faulty_tier import FaultyTier

from quire.engine.session_calls import Sessions
from quire.errors import CapacityError
from quire.sampling.params import SamplingParams
from quire.sessions import session_registry
from quire.tiers.host import HostTier

TENANTS = (None, "a", "b")
FLOOR, QUOTA = 6, 24


class SessionRun:
    def __init__(self, seed: int, *, window: int, faults: int, num_states: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.engine = FakeEngine(
            num_blocks=48,
            spec=window_spec(window) if window else full_spec(),
            num_state_slots=num_states,
            tiers=[] if num_states else [FaultyTier(HostTier(1 << 20), faults)],
            preemption="recompute",
        )
        self.engine.engine.pins.max_blocks = 12
        size = self.engine.cache.block_bytes
        self.engine.engine.tenants.add("a", floor=FLOOR * size)
        self.engine.engine.tenants.add("b", quota=QUOTA * size)
        self.sessions = Sessions(
            self.engine.engine, self.engine.cache, lambda: self.engine.stack, self.compute
        )  # type: ignore[arg-type]
        self.registry = self.engine.engine.sessions
        self.paths: dict[tuple[str | None, str], list[int]] = {}
        self.under_way: dict[str, tuple[tuple[str | None, str], list[int]]] = {}

    def compute(self, prompt: Any, options: Any) -> Any:
        request_id = self.engine.engine.submit(prompt, options)
        while request_id not in self.engine.outputs:
            self.step()
        return self.engine.outputs.pop(request_id)

    def draw(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def submit(self) -> None:
        place = self.draw(TENANTS), self.draw("xyz")
        path = self.paths.get(place, [])
        keep = self.draw([len(path), len(path), len(path) // 2, 8])
        prompt = [*path[:keep], *self.rng.integers(0, 6, int(self.rng.integers(1, 9))).tolist()][-70:]
        params = SamplingParams(max_tokens=int(self.rng.integers(1, 10)))
        try:
            request_id = self.engine.submit(
                prompt,
                params,
                tenant=place[0],
                session=place[1],
                cache_priority=self.draw(["normal", "keep", "discard"]),
            )
        except CapacityError:
            return  # pins leave it no room
        self.under_way[request_id] = place, prompt

    def step(self) -> None:
        before = self.owned()
        self.engine.step()
        self.check(before)
        for request_id, (place, prompt) in list(self.under_way.items()):
            output = self.engine.outputs.get(request_id)
            if output is not None and output.finished:
                del self.under_way[request_id], self.engine.outputs[request_id]
                answer = output.outputs[0].token_ids
                if output.outputs[0].finish_reason != "error":
                    assert answer == expected_tokens(self.engine.spec, prompt, len(answer))
                self.paths[place] = prompt + answer

    def call(self) -> None:
        tenant, name = self.draw(TENANTS), self.draw("xyz")
        action = self.draw(["hold", "hold_for", "release", "superseded", "tool", "prefetch", "evict"])
        before, others = self.owned(), self.contents_of_others(tenant)
        if action == "hold":
            receipt = self.sessions.hold(name, tenant=tenant)
        elif action == "hold_for":
            receipt = self.sessions.hold(name, 40.0, tenant=tenant)
        elif action == "tool":
            self.sessions.tool_call_began(name, tenant=tenant)
            receipt = None
        elif action == "evict":
            found = self.registry.find(tenant, name)
            if found is not None and found.newest is not None:
                self.engine.cache.evict_path(found.newest.tokens, **found.newest.content)
            receipt = None
        else:
            receipt = getattr(self.sessions, action)(name, tenant=tenant)
        if receipt is not None and receipt.outcome == "accepted":
            assert receipt.reason is None
        if action != "prefetch":
            assert self.contents_of_others(tenant) == others, (
                f"{action} of {tenant!r} touched another tenant's content"
            )
        self.check(before)

    def owned(self) -> dict[str, int]:
        tenants = self.engine.engine.tenants
        return {name: sum(self.engine.cache.owner_counts(tenants[name].owner_id)) for name in ("a", "b")}

    def contents_of_others(self, tenant: str | None) -> set[tuple[Any, ...]]:
        """(namespace, block, cache priority) of the content of the other tenants in memory."""
        tree = self.engine.cache.tree()
        own = b"" if tenant is None else self.engine.engine.tenants.namespace(tenant)
        return {
            (tree.namespaces[tree.namespace_index[row]], block, int(level))
            for row in range(len(tree))
            for block, level in zip(tree.block_ids[row].tolist(), tree.cache_priorities[row], strict=True)
            if tree.namespaces[tree.namespace_index[row]] != own
        }

    def check(self, before: dict[str, int]) -> None:
        self.engine.cache.check()
        self.registry.check()
        now = self.owned()
        assert now["b"] <= max(QUOTA, before["b"]), "a quota is broken"
        assert self.engine.cache.pins.num_blocks <= 12


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("window", "faults", "num_states"),
    [(0, 0, 0), (5, 3, 0), (0, 0, 6)],
    ids=["full", "window-faults", "states"],
)
def test_no_session_call_breaks_a_limit(
    monkeypatch: pytest.MonkeyPatch, seed: int, window: int, faults: int, num_states: int
) -> None:
    monkeypatch.setattr(session_registry, "MAX_SESSIONS", 6)
    monkeypatch.setattr(session_registry, "TURNS_UNTIL_SUPERSEDED", 3)
    run = SessionRun(seed, window=window, faults=faults, num_states=num_states)
    for _ in range(90):
        kind = run.draw(["submit", "submit", "step", "step", "step", "call", "call"])
        getattr(run, kind)()
    while run.engine.engine.has_work:
        run.step()
    for session in run.registry:
        run.registry.release(session)
    run.engine.check_empty()
