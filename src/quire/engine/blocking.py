"""`run` and `begin`: submit requests to the engine's thread, and wait for their outputs in the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.core import EngineCore
from quire.engine.driver import Driver, Mailbox
from quire.engine.engine import Engine
from quire.engine.progress import ProgressBar
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions

__all__ = ["begin", "run"]


def run(
    driver: Driver,
    engine: Engine,
    requests: Sequence[tuple[Prompt, RequestOptions]],
    *,
    progress: bool = False,
) -> list[RequestOutput | None]:
    """Their outputs once all have ended, None for one that was ended elsewhere. progress: a bar on stderr.

    An error, or an interruption, ends all of the requests. *raises:* as `Engine.submit`.
    """
    driver.refuse_to_wait_here()
    mailbox = Mailbox()
    ids: list[str] = []

    def submit() -> None:
        ids.extend(engine.submit_all(requests))
        for request_id in ids:
            driver.expect(request_id, mailbox.put)

    def drop() -> None:
        for request_id in ids:
            driver.drop(request_id)

    results: dict[str, RequestOutput | None] = {}
    try:
        driver.call_open(submit)
        with ProgressBar(len(ids), enabled=progress) as bar:
            while len(results) < len(ids):
                for request_id, answer in mailbox.pop_all().items():
                    if isinstance(answer, BaseException):
                        raise answer
                    if answer is None or answer.finished:
                        results[request_id] = answer
                        bar.advance(1)
        return [results[request_id] for request_id in ids]
    except BaseException:
        driver.post(drop)  # runs after `submit`, and so has all ids
        raise


def begin(driver: Driver, core: EngineCore, submit: Callable[[Engine], str]) -> tuple[str, Mailbox]:
    """Submits a request; its id, and the mailbox for its outputs, which are pulled (`Driver.want`).

    *raises:* as `submit`; ArgumentError: closed, or the calling thread is inside of `torch.autocast`.
    """
    mailbox = Mailbox()

    def call() -> str:
        request_id = submit(core.engine)
        driver.expect(request_id, mailbox.put, pulled=True)
        return request_id

    driver.require_open()
    core.changes.refuse_autocast()
    return driver.call_open(call), mailbox
