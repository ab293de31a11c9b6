"""`Turns`: the requests of the calls of one `LLM`, from several threads: whose turn it is computes a step for all.

Not the engine: it only keeps, between two steps, the newest output of each request that a call waits for. A step is
computed by whichever call has the lock and finds no output yet; what it gives others is there when their turn comes.

Invariants
    T1  `outputs` has an entry for each request somebody waits for, and for no other; None where nothing new has come.
    T2  every call here but `lock` itself is made with the lock held.

Cost: `step` a step of the engine, and O(outputs of it).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from quire.engine.interrupt import deferred_interrupt
from quire.engine.progress import ProgressBar
from quire.engine.prompts import Prompt
from quire.engine.request import RequestOutput
from quire.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.engine import Engine

__all__ = ["Turns"]


class Turns:
    """See the module's text."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.RLock()
        self.outputs: dict[str, RequestOutput | None] = {}

    def submit(self, prompt: Prompt, params: SamplingParams, *, stream: bool, **options: Any) -> str:
        """Queues a request that the caller waits for. options, *raises:* as `Engine.submit`."""
        request_id = self.engine.submit(
            prompt.token_ids, params, prompt=prompt.text, stream=stream, **options
        )
        self.expect(request_id)
        return request_id

    def expect(self, request_id: str) -> None:
        """From now on somebody waits for the request."""
        self.outputs[request_id] = None

    def take(self, request_id: str) -> RequestOutput | None:
        """Its newest output, if one has come since the last call."""
        output, self.outputs[request_id] = self.outputs[request_id], None
        return output

    def forget(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        self.outputs.pop(request_id, None)

    def run(
        self, requests: Iterable[tuple[Prompt, SamplingParams]], *, progress: bool = False, **options: Any
    ) -> list[RequestOutput | None]:
        """Submits requests and steps until all have ended; their outputs, None for one that was ended elsewhere.

        Where it raises, interrupted too, none of them is left.
        """
        ids: list[str] = []
        try:
            for prompt, params in requests:
                ids.append(self.submit(prompt, params, stream=False, **options))
            with ProgressBar(len(ids), enabled=progress) as bar:
                pending = set(ids)
                while pending:
                    done = {i for i in pending if (output := self.outputs[i]) is not None and output.finished}
                    pending -= done
                    bar.advance(len(done))
                    if pending and not done:
                        self.step()
            return [self.outputs[request_id] for request_id in ids]
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        finally:
            for request_id in ids:
                self.forget(request_id)

    def step(self) -> None:
        """One step, its outputs put where the calls look for them."""
        with deferred_interrupt():
            for output in self.engine.step():
                if output.request_id in self.outputs:
                    self.outputs[output.request_id] = output
