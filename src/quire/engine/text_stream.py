"""`TextStream`: the text of one request as it comes, for a `for` loop. See `LLM.stream`.

Cost: a step of the engine for each piece, unless another call's step has brought it already.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine.request import RequestOutput
from quire.engine.turns import Turns

__all__ = ["TextStream"]


class TextStream:
    """An iterator over pieces of text; `result` is the output so far, whole once the iteration has ended.

    turns: which has the request, that nobody else waits for. Closing it (or leaving it to the garbage collector) ends
    the request and returns its blocks.
    """

    def __init__(self, turns: Turns, request_id: str) -> None:
        self._turns = turns
        self.request_id = request_id
        self._closed = False
        self._num_shown = 0  # characters
        self.result: RequestOutput | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._closed:
            with self._turns.lock:
                output = self._turns.take(self.request_id)
                if output is None:
                    try:
                        self._turns.step()
                    except BaseException:
                        self.close()
                        raise
                    continue
            self.result = output
            if output.finished:
                self.close()
                if output.error is not None:
                    raise output.error
            # Not `new_text`: steps that others ran may have put several outputs in one place.
            text = output.outputs[0].text
            new, self._num_shown = text[self._num_shown :], len(text)
            if new:
                return new
        raise StopIteration

    def close(self) -> None:
        """Ends the request if it still runs."""
        if not self._closed:
            self._closed = True
            with self._turns.lock:
                self._turns.forget(self.request_id)
                aborted = self._turns.engine.abort(self.request_id)
                self.result = aborted or self.result

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()
