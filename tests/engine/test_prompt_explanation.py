"""The reason why a hit ends: every reason, and no data of another tenant."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.cache_case import BACKENDS

from quire import LLM, AsyncEngine, SamplingParams
from quire.cli.main import main

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
SECRET = b"a secret of the server's"


def tokens_of(seed: int, n: int) -> list[int]:
    return [100 + seed, *np.random.default_rng(seed).integers(5, 90, n - 1).tolist()]


@pytest.fixture(params=BACKENDS)
def llm(request: pytest.FixtureRequest) -> Any:
    with tiny_llm.llm(backend=request.param, kv_memory="192KiB", max_num_seqs=4) as made:
        made.tenants.add("alice")
        made.tenants.add("bob")
        yield made


def serve(llm: LLM, prompt: list[int], **options: Any) -> None:
    llm.generate([prompt], ONE, **options)


def test_never_seen_differs_and_complete(llm: LLM) -> None:
    prompt = tokens_of(0, 60)
    answer = llm.monitor.explain(prompt)
    assert (answer.num_hit_tokens, answer.stop, answer.reason) == (0, 0, "never seen")
    serve(llm, prompt)
    answer = llm.monitor.explain(prompt)
    assert (answer.num_hit_tokens, answer.stop, answer.reason) == (59, None, "complete")
    assert "nothing is missing" in str(answer)
    other = [*prompt[:37], 1, 2, 3, *prompt[40:]]
    answer = llm.monitor.explain(other)
    assert (answer.num_hit_tokens, answer.stop, answer.reason, answer.differs_at) == (37, 37, "differs", 37)
    assert answer.nearest.tolist() == prompt[32:48]
    assert f"differs at token 37: stored {prompt[37:45]}, asked {other[37:45]}" in str(answer)
    answer = llm.monitor.explain([*prompt, 9, 9, 9])
    assert (answer.num_hit_tokens, answer.stop, answer.reason) == (60, 60, "never seen")
    before = llm.cache.stats()
    llm.monitor.explain(other)
    assert llm.cache.stats() == before


def test_evicted_when_and_for_whom(llm: LLM) -> None:
    prompt = tokens_of(0, 60)
    serve(llm, prompt, tenant="alice")
    for seed in range(1, 6):
        serve(llm, tokens_of(seed, 150), tenant="bob")
    told = llm.monitor.explain(prompt, tenant="alice")
    assert (told.reason, told.lost_for) == ("evicted", None)
    assert told.lost_s_ago is not None
    assert "was evicted" in str(told)
    assert "bob" not in str(told)
    all_told = llm.monitor.explain(prompt, tenant="alice", as_administrator=True)
    assert all_told.lost_for == "tenant 'bob'"
    assert "for the need of tenant 'bob'" in str(all_told)
    llm.cache.reset()
    assert llm.monitor.explain(tokens_of(5, 150), tenant="bob").reason == "forgotten"


def test_a_pin_that_expired(llm: LLM) -> None:
    now = [0.0]
    llm.engine.pins.use_clock(lambda: now[0])
    prompt = tokens_of(0, 40)
    llm.pins.add(prompt, ttl=5)
    now[0] = 6
    assert list(llm.pins) == []
    assert llm.monitor.explain(prompt).reason == "complete"
    for seed in range(1, 6):
        serve(llm, tokens_of(seed, 150))
    answer = llm.monitor.explain(prompt)
    assert answer.reason == "expired"
    assert "its pin expired, and it was evicted" in str(answer)


def test_other_namespaces_are_told_to_their_owner_alone(llm: LLM) -> None:
    prompt = tokens_of(0, 40)
    serve(llm, prompt, tenant="alice", cache_salt="chat 1")
    owner = llm.monitor.explain(prompt, tenant="alice")
    assert (owner.num_hit_tokens, owner.reason) == (0, "other namespace")
    assert "'alice'" in str(owner)
    assert llm.monitor.explain(prompt, tenant="bob").reason == "never seen"
    assert llm.monitor.explain(prompt, tenant="bob", as_administrator=True).reason == "other namespace"
    assert llm.monitor.explain(prompt).reason == "other namespace"
    assert str(llm.monitor.explain(prompt, tenant="bob")) == str(
        llm.monitor.explain(tokens_of(9, 40), tenant="bob")
    )


def test_behind_what_is_published_nothing_of_others_shows(llm: LLM) -> None:
    system = tokens_of(50, 37)
    llm.pins.publish(system)
    mine, theirs = [*system, *tokens_of(1, 30)], [*system, *tokens_of(2, 30)]
    serve(llm, theirs, tenant="bob")
    for asked in (mine, theirs):
        answer = llm.monitor.explain(asked, tenant="alice")
        assert (answer.num_hit_tokens, answer.num_published_tokens, answer.stop) == (37, 37, 37)
        assert not set(answer.nearest.tolist()) & set(theirs[37:])
        assert answer.reason == "never seen" or answer.nearest.tolist() == system[32:]
    assert llm.monitor.explain(theirs, tenant="bob").reason == "complete"


def test_tiers_and_other_models(tmp_path: Path) -> None:
    prompt = tokens_of(0, 60)
    options: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": "64MiB", "tenant_secret": SECRET}
    with tiny_llm.llm(**options) as llm:
        llm.tenants.add("alice")
        serve(llm, prompt)
        serve(llm, tokens_of(1, 60), tenant="alice")
    with tiny_llm.llm(**options) as llm:
        llm.tenants.add("alice")
        llm.tenants.add("bob")
        answer = llm.monitor.explain(prompt)
        assert (answer.num_hit_tokens, answer.num_tier_tokens) == (0, {"disk": 48})
        assert (answer.stop, answer.reason) == (48, "never seen")
        assert "48 more in the tier disk" in str(answer)
        assert (
            "never seen, or no longer: the last 12 fill no block, and are found only while in memory"
            in str(answer)
        )
        assert llm.monitor.explain(tokens_of(1, 60), tenant="alice").num_tier_tokens == {"disk": 48}
        assert llm.monitor.explain(tokens_of(1, 60), tenant="bob").reason == "never seen"
        assert llm.monitor.explain(tokens_of(1, 60)).reason == "other namespace"
        assert llm.generate([tokens_of(1, 60)], ONE, tenant="alice")[0].num_tier_tokens == {"disk": 48}
    with LLM((tiny_llm.model(1), tiny_llm.tokenizer()), kv_memory="2MiB", **options) as llm:
        llm.tenants.add("alice")
        llm.tenants.add("bob")
        answer = llm.monitor.explain(prompt)
        assert (answer.num_tier_tokens, answer.reason) == ({}, "other fingerprint")
        assert llm.monitor.explain(tokens_of(1, 60), tenant="alice").reason == "other fingerprint"
        assert llm.monitor.explain(tokens_of(1, 60), tenant="bob").reason == "never seen"


def test_where_a_prompt_leaves_what_is_on_disk(tmp_path: Path) -> None:
    """A new engine over the folder of an old one says what is stored there instead; to nobody else."""
    prompt = tokens_of(0, 70)
    options: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": "64MiB", "tenant_secret": SECRET}
    with tiny_llm.llm(**options) as llm:
        llm.tenants.add("alice")
        serve(llm, prompt, tenant="alice")
    with tiny_llm.llm(**options) as llm:
        llm.tenants.add("alice")
        llm.tenants.add("bob")
        for at in (37, 48, 3):
            other = [*prompt[:at], 1, 2, 3, *prompt[at + 3 :]]
            answer = llm.monitor.explain(other, tenant="alice")
            stop = at // 16 * 16
            assert (sum(answer.num_tier_tokens.values()), answer.stop, answer.reason) == (
                stop,
                stop,
                "differs",
            )
            assert (answer.differs_at, answer.differs_on_disk) == (at, True)
            end = at // 16 * 16 + 16
            assert answer.nearest.tolist() == prompt[at:end]
            shown = prompt[at : min(at + 8, end)]
            assert (
                f"stored prefix on disk differs at token {at}: stored {shown}, asked {other[at : at + 8]}"
                in str(answer)
            )
            told = llm.monitor.explain(other, tenant="bob")
            assert (told.reason, told.nearest.tolist()) == ("never seen", [])
        salted = llm.monitor.explain([*prompt[:37], 1, 2, 3], tenant="alice", cache_salt="other")
        assert salted.nearest.tolist() == []
        # What memory has is nearer once it has it.
        longer = [*prompt[:60], *[4] * 10]
        serve(llm, longer, tenant="alice")
        answer = llm.monitor.explain([*longer[:50], 1, *longer[51:]], tenant="alice")
        assert (answer.reason, answer.differs_at, answer.differs_on_disk) == ("differs", 50, False)


def test_a_prompt_within_a_stored_segment_does_not_differ_from_it(tmp_path: Path) -> None:
    prompt = tokens_of(0, 70)
    options: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    with tiny_llm.llm(**options) as llm:
        serve(llm, prompt)
    with tiny_llm.llm(**options) as llm:
        answer = llm.monitor.explain(prompt[:10])
        assert (answer.reason, answer.differs_at, answer.differs_on_disk) == ("longer", 10, True)
        assert str(answer).endswith(
            "the nearest stored segment on disk is longer than the prompt of 10 tokens"
        )


@pytest.mark.ci  # two processes
@pytest.mark.parametrize("as_json", [True, False])
def test_the_command(tmp_path: Path, as_json: bool) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quire", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    folder = str(tmp_path / "disk")
    missing = run("explain", "def f(", "--disk-cache", folder)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "expected a folder with a disk cache, got none" in missing.stderr
    assert "expected --disk-cache DIR, --remote-cache URL or --config FILE" in run("explain", "def f(").stderr
    text = "def add(a, b):\n    return a + b\n\n" * 12
    stored = run("generate", text, "--max-tokens", "1", "--disk-cache", folder, "--kv-memory", "64MiB")
    assert stored.returncode == 0, stored.stderr
    flags = ["--json"] if as_json else []
    found = run("explain", text, "--disk-cache", folder, *flags)
    assert found.returncode == 0, found.stderr
    if as_json:
        fields = json.loads(found.stdout)
        assert fields["num_hit_tokens"] == 0
        assert fields["num_tier_tokens"]["disk"] >= fields["num_tokens"] - 17
    else:
        assert "more in the tier disk" in found.stdout
        other = run("explain", "import os\n" + text, "--disk-cache", folder)
        assert "is the first one missing" in other.stdout


def test_the_command_over_somebody_elses_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(sys, "argv", ["quire", "explain", "def f(", "--disk-cache", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    expected = f"quire: expected a folder for the disk cache that can be written, got {tmp_path}: Permission denied\n"
    assert (left.value.code, out, err) == (2, "", expected)


CONFIG = """
[model]
disk_cache = "{folder}"
kv_memory = "32MiB"
max_num_seqs = 4
host_cache = "1MiB"
[server]
tenant_secret = "{secret}"
[[tenants]]
name = "alice"
keys = ["env:A_KEY_THAT_IS_NOT_SET"]
"""


def config_of(tmp_path: Path, secret: str) -> str:
    file = tmp_path / f"{secret[:5]}.toml"
    file.write_text(CONFIG.format(folder=tmp_path / "disk", secret=secret))
    return str(file)


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`quire explain` with these arguments: its status, what it says, and what is wrong."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["quire", "explain", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capsys.readouterr()

    return run


def test_the_command_knows_a_servers_tenants(tmp_path: Path, explained: Any) -> None:
    file = config_of(tmp_path, SECRET.decode())
    code, _, err = explained("x", "--config", file, "--tenant", "bob")
    assert (code, "expected a tenant of" in err, "(known: alice)" in err) == (2, True, True)
    (tmp_path / "none.toml").write_text('[server]\ntenant_secret = "short"')
    code, _, err = explained("x", "--config", str(tmp_path / "none.toml"), "--tenant", "alice")
    assert (code, "expected at least 16 bytes, got 5 bytes" in err) == (2, True)


@pytest.mark.ci  # the embedded model, five times
def test_the_command_asks_in_a_tenants_namespace(tmp_path: Path, explained: Any) -> None:
    text = "def add(a, b):\n    return a + b\n\n" * 12
    options: dict[str, Any] = {"kv_memory": "32MiB", "disk_cache": tmp_path / "disk", "tenant_secret": SECRET}
    with LLM(**options) as llm:
        llm.tenants.add("alice")
        llm.generate([text], ONE, tenant="alice", cache_salt="chat")
    file = config_of(tmp_path, SECRET.decode())

    def tokens(*arguments: str) -> tuple[dict[str, int], str]:
        code, out, err = explained(text, "--json", *arguments)
        assert code == 0, err
        found = json.loads(out)
        return found["num_tier_tokens"], found["reason"]

    whose = ("--config", file, "--tenant", "alice")
    found, _ = tokens(*whose, "--cache-salt", "chat")
    assert found["disk"] > 100
    assert tokens(*whose) == ({}, "other namespace")
    assert tokens(*whose, "--cache-salt", "other") == ({}, "other namespace")
    assert tokens("--config", file) == ({}, "other namespace")
    other = config_of(tmp_path, "another secret altogether")
    assert tokens("--config", other, "--tenant", "alice", "--cache-salt", "chat") == ({}, "other namespace")


_KILLED = """
import os, signal, sys
from support import tiny_llm
from quire import SamplingParams
llm = tiny_llm.llm(disk_cache=sys.argv[1], disk_cache_size="64MiB", tenant_secret=b"a secret of the server's")
llm.tenants.add("alice")
llm.generate([eval(sys.argv[2])], SamplingParams(max_tokens=1, temperature=0), tenant="alice")
llm.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ci
def test_what_a_killed_process_stored_is_named_rightly(tmp_path: Path) -> None:
    """It is of another namespace, and not of another model, though nobody took leave."""
    prompt = tokens_of(1, 60)
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(prompt)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -9, done.stderr
    options: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": "64MiB", "tenant_secret": SECRET}
    with tiny_llm.llm(**options) as llm:
        llm.tenants.add("alice")
        assert llm.monitor.explain(prompt).reason == "other namespace"
        assert llm.monitor.explain(prompt, tenant="alice").num_tier_tokens == {"disk": 48}
    with LLM((tiny_llm.model(1), tiny_llm.tokenizer()), kv_memory="2MiB", **options) as llm:
        assert llm.monitor.explain(prompt).reason == "other fingerprint"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_tier_has_given_up_is_said(backend: str, tmp_path: Path) -> None:
    prompt = tokens_of(0, 60)
    with tiny_llm.llm(backend=backend, kv_memory="128KiB", host_cache="64KiB") as llm:
        serve(llm, prompt)
        for seed in range(1, 12):
            serve(llm, tokens_of(seed, 60))
        llm.flush()
        answer = llm.monitor.explain(prompt)
        assert (answer.num_hit_tokens, answer.num_tier_tokens, answer.reason) == (0, {}, "evicted")
        assert list(answer.tier_losses) == ["host"]
        assert ", from the tier host " in str(answer)
        assert llm.monitor.explain(tokens_of(20, 60)).tier_losses == {}


class Hanging:
    """The host tier of an engine, whose answers wait until `free` is set; `asked` is, once somebody waits."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.free = threading.Event(), threading.Event()
        assert llm.tiers is not None
        tier = llm.tiers.stack._tiers[0].tier
        contains = tier.contains

        def wait(keys: Any) -> Any:
            self.asked.set()
            assert self.free.wait(60)
            return contains(keys)

        monkeypatch.setattr(tier, "contains", wait)


def test_no_step_waits_for_a_tier_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens_of(0, 60)
    long = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)

    async def main(llm: LLM) -> None:
        async with AsyncEngine(llm) as engine:
            outputs = engine.generate(prompt, long)
            await anext(outputs)
            tier = Hanging(llm, monkeypatch)
            asking = asyncio.create_task(engine.explain(tokens_of(1, 60)))
            assert await asyncio.to_thread(tier.asked.wait, 60)
            rest = [output async for output in outputs]
            assert len(rest[-1].outputs[0].token_ids) == 100
            assert not asking.done()
            tier.free.set()
            assert (await asking).reason == "never seen"

    with tiny_llm.llm(host_cache="1MiB") as llm:
        asyncio.run(asyncio.wait_for(main(llm), 120))


def test_other_threads_step_while_one_asks_a_tier_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens_of(0, 60)
    with tiny_llm.llm(host_cache="1MiB") as llm, ThreadPoolExecutor(1) as other:
        stream = iter(llm.stream([prompt], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)))
        next(stream)
        tier = Hanging(llm, monkeypatch)
        asking = other.submit(llm.monitor.explain, tokens_of(1, 60))
        assert tier.asked.wait(60)
        assert [*stream]
        assert not asking.done()
        tier.free.set()
        assert asking.result(60).silent_tiers == ()


def test_a_tier_that_does_not_answer_in_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.prompt_explanation._TIERS_S", 0.05)
    prompt = tokens_of(0, 60)
    with tiny_llm.llm(host_cache="1MiB", block_size=8) as llm:
        serve(llm, prompt)
        tier = Hanging(llm, monkeypatch)
        answer = llm.monitor.explain([*prompt, 1])
        assert (answer.num_hit_tokens, answer.stop, answer.silent_tiers) == (60, None, ("host",))
        assert "the tier host does not answer" in str(answer)
        tier.free.set()
