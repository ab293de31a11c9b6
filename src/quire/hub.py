"""Whether to ask the Hugging Face Hub for a model; an unreachable Hub is detected once, and quickly.

`huggingface_hub` asks for each file of a model anew, and waits 10 s each time: without a network a start would take
minutes. Here a model's config is asked for once, before anything else. Models in the local cache open without the Hub.
The process's settings stay unchanged, and neither torch nor transformers is imported.

Cost: one request, whose answer is valid for a minute.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from pathlib import Path
from typing import Any

from quire.errors import LoadError

__all__ = ["cached_folder", "is_id", "offline_folder"]

_CONNECT_S = 1.5  # for a connection, including the look-up of the name
_HOLDS_S = 60.0
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIGS = ("config.json", "adapter_config.json")  # one of them is in each model

_log = logging.getLogger("quire")
_answers: dict[str, tuple[float, str]] = {}  # by endpoint: time, and the reason why it cannot be asked, or ""


def is_id(source: Any) -> bool:
    """Whether a model's name is a Hub id: by its form, and not an existing path."""
    is_name = isinstance(source, str) and _ID.fullmatch(source) is not None
    return is_name and not source.lower().endswith(".gguf") and not Path(source).exists()


def offline_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model in the local cache if its Hub cannot be asked; None if it can.

    *raises:* LoadError: it cannot be asked, and the local cache has no such model.
    """
    from huggingface_hub import constants

    endpoint = constants.ENDPOINT
    is_offline = constants.HF_HUB_OFFLINE
    reason = (
        "is not asked, as HF_HUB_OFFLINE is set"
        if is_offline
        else _unreachable_reason(endpoint, name, revision)
    )
    if not reason:
        return None
    folder = cached_folder(name, revision, f"{endpoint} {reason}")
    if not is_offline:
        _log.warning("%s is taken from the local cache: %s %s", name, endpoint, reason)
    return folder


def cached_folder(name: str, revision: str | None = None, reason: str = "nothing is fetched here") -> Path:
    """The folder of a model in the local cache. reason: why the Hub is not asked.

    *raises:* LoadError: the cache has no such model.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    for file in _CONFIGS:
        if isinstance(path := try_to_load_from_cache(name, file, revision=revision), str):
            return Path(path).parent
    of_revision = f" of revision {revision!r}" if revision else ""
    raise LoadError(
        f"cannot load the model {name!r}: there is no such folder, the local cache ({constants.HF_HUB_CACHE}) has no "
        f"such model{of_revision}, and {reason}; fetch it where there is a network (hf download {name} --local-dir "
        "DIR) and name DIR, or copy the cache and set HF_HUB_OFFLINE=1"
    )


def _unreachable_reason(endpoint: str, name: str, revision: str | None) -> str:
    """The reason why the Hub cannot be asked; "" if it responds, with any answer."""
    at, answer = _answers.get(endpoint, (0.0, ""))
    if not at or time.monotonic() - at > _HOLDS_S:
        answer = _ask(f"{endpoint}/{name}/resolve/{revision or 'main'}/config.json")
        _answers[endpoint] = time.monotonic(), answer
    return answer


def _ask(url: str) -> str:
    """The reason why `url` gets no response, or "". HF_HUB_ETAG_TIMEOUT limits the wait for an answer, and for the
    connection if it is shorter."""
    from huggingface_hub import constants, get_session

    outcome: queue.SimpleQueue[str] = queue.SimpleQueue()
    is_connected = threading.Event()
    answer_s = constants.HF_HUB_ETAG_TIMEOUT
    connect_s = min(_CONNECT_S, answer_s)

    def trace(event: str, info: Any) -> None:
        if event == "connection.connect_tcp.complete" or event.endswith("send_request_headers.started"):
            is_connected.set()

    def ask() -> None:
        try:
            answer = get_session().head(
                url, timeout=answer_s + 5, follow_redirects=False, extensions={"trace": trace}
            )
            outcome.put(f"answers with status {answer.status_code}" if answer.status_code >= 500 else "")
        except Exception as error:  # clients, proxies and certificates raise many kinds
            outcome.put(f"cannot be reached ({' '.join(str(error).split()) or type(error).__name__})")
        is_connected.set()

    # In a thread, since the look-up of a name has no timeout.
    threading.Thread(target=ask, name="quire hub", daemon=True).start()
    if not is_connected.wait(connect_s):
        return f"cannot be reached within {connect_s:g} s"
    try:
        return outcome.get(timeout=answer_s)
    except queue.Empty:
        return f"does not answer within {answer_s:g} s (HF_HUB_ETAG_TIMEOUT says how long to wait)"
