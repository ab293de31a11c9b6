"""Models of the Hub without a network: a quick one-line error, and opening from the local cache."""

from __future__ import annotations

import http.server
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from quire import LLM, hub
from quire.errors import LoadError

EMBEDDED = Path(__file__).parents[1] / "src/quire/weights/embedded"
WHAT_TO_DO = (
    r"hf download org/name --local-dir DIR\) and name DIR, or copy the cache and set HF_HUB_OFFLINE=1$"
)


class Silent:
    """An address that takes connections and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        self._taken: list[socket.socket] = []

    @property
    def num_asked(self) -> int:
        """Connections so far: they are made, accepted or not."""
        self._listener.setblocking(False)
        try:
            while True:
                self._taken.append(self._listener.accept()[0])
        except BlockingIOError:
            return len(self._taken)

    def close(self) -> None:
        for one in (*self._taken, self._listener):
            one.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    one = Silent()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No answer of another test, and an empty cache."""
    monkeypatch.setattr(hub, "_answers", {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)


COMMIT = "0" * 40


def cached_as(folder: Path) -> Path:
    return folder / "models--org--name" / "snapshots" / COMMIT


def cache_model(folder: Path) -> None:
    """The embedded model as org/name of the Hub's cache."""
    snapshot = cached_as(folder)
    snapshot.mkdir(parents=True)
    refs = folder / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    for file in EMBEDDED.iterdir():
        (snapshot / file.name).symlink_to(file)


def answering(status: int, after: threading.Event | None = None) -> http.server.HTTPServer:
    """after: it answers only then."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if after is not None:
                after.wait(60)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *about: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_a_hub_that_is_silent_is_asked_once(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", silent.url)
    for _ in range(2):
        with pytest.raises(LoadError, match=WHAT_TO_DO) as refusal:
            LLM("org/name")
        assert f"{silent.url} does not answer within 0.2 s" in str(refusal.value)
    assert silent.num_asked == 1


def test_a_hub_without_a_connection_is_not_waited_for(
    silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a name's look-up or a firewall swallows what is sent: the time for an answer is far longer."""
    monkeypatch.setattr(constants, "ENDPOINT", silent.url)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1e6)
    monkeypatch.setattr(hub, "_CONNECT_S", 0.1)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: threading.Event().wait())
    with pytest.raises(LoadError, match=r"cannot be reached within 0.1 s; .*" + WHAT_TO_DO):
        hub.offline_folder("org/name")


def test_a_slow_hub_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may take longer than a connection: it comes once the time for that is over."""
    waited = threading.Event()

    class Slow(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            is_set = super().wait(timeout)
            waited.set()
            return is_set

    server = answering(200, after=waited)
    monkeypatch.setattr(constants, "ENDPOINT", "http://{}:{}".format(*server.server_address[:2]))
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 60)
    monkeypatch.setattr(hub.threading, "Event", Slow)
    assert hub.offline_folder("org/name") is None
    server.shutdown()


def test_a_hub_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(LoadError, match=r"cannot be reached \(.*refused\); .*" + WHAT_TO_DO):
        hub.offline_folder("org/name")


@pytest.mark.parametrize(("status", "is_asked"), [(200, True), (404, True), (401, True), (503, False)])
def test_any_answer_is_one_but_that_of_a_server_that_is_down(
    status: int, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 60)
    server = answering(status)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        if is_asked:
            assert hub.offline_folder("org/name") is None
        else:
            with pytest.raises(LoadError, match="answers with status 503"):
                hub.offline_folder("org/name")
    finally:
        server.shutdown()
        server.server_close()


def test_offline_nothing_is_asked(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", silent.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="is not asked, as HF_HUB_OFFLINE is set"):
        hub.offline_folder("org/name")
    cache_model(Path(constants.HF_HUB_CACHE))
    assert hub.offline_folder("org/name") == cached_as(Path(constants.HF_HUB_CACHE))
    assert silent.num_asked == 0


def test_what_the_cache_has_is_taken_from_it(
    silent: Silent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", silent.url)
    cache_model(Path(constants.HF_HUB_CACHE))
    with caplog.at_level(logging.WARNING, "quire"):
        assert hub.offline_folder("org/name") == cached_as(Path(constants.HF_HUB_CACHE))
    assert "org/name is taken from the local cache" in caplog.text
    with pytest.raises(LoadError, match="no such model of revision 'v2', and"):
        hub.offline_folder("org/name", "v2")


def test_names_of_the_hub_and_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert [hub.is_id(one) for one in ("org/name", "gpt2", "org/name-0.5B_x")] == [True] * 3
    for other in (None, tmp_path, "here", "./there", "a/b/c", "/org/name", "tiny.gguf", "org/tiny.GGUF", ""):
        assert not hub.is_id(other), other


PROGRAM = """
import os
import sys
environment = dict(os.environ)
from quire import LLM
llm = LLM("org/name", kv_memory="16MiB")
print(llm.name, llm.generate("def f(")[0].outputs[0].finish_reason is not None, dict(os.environ) == environment)
"""


def test_a_cached_model_opens_without_a_network(silent: Silent, tmp_path: Path) -> None:
    """Whole: config, weights, tokenizer and generation config; nothing of the process is changed for it."""
    cache_model(tmp_path / "hub")
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": silent.url, "HF_HUB_ETAG_TIMEOUT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, timeout=240
    )
    assert ran.stdout == "org/name True True\n", ran.stderr
    assert silent.num_asked == 1
