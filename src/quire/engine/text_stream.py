"""`TextStream`: the text of one request as it comes, for a `for` loop. See `LLM.stream`.

Cost: one step of the engine for each piece, unless another call's step has computed it already.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine.driver import Driver, Mailbox
from quire.scheduler.request import RequestOutput

__all__ = ["TextStream"]


class TextStream:
    """An iterator over pieces of text; `result` is the output so far, complete once the iteration has ended.

    mailbox: receives its outputs, pulled one by one. Closing the stream (or its garbage collection) ends the request
    and frees its blocks.
    """

    def __init__(self, driver: Driver, request_id: str, mailbox: Mailbox) -> None:
        self._driver = driver
        self._mailbox = mailbox
        self.request_id = request_id
        self._closed = False
        self._num_shown = 0  # characters
        self.result: RequestOutput | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._closed:
            output = self._next_output()
            if output is None:
                self.close()
                break
            self.result = output
            if output.finished:
                self.close()
                if output.error is not None:
                    raise output.error
            # Not `new_text`: several outputs may have come since the last call.
            text = output.outputs[0].text
            new, self._num_shown = text[self._num_shown :], len(text)
            if new:
                return new
        raise StopIteration

    def _next_output(self) -> RequestOutput | None:
        """The next output; None: the request was ended elsewhere. An error, or an interruption, ends the request."""
        self._driver.process.check()
        self._driver.refuse_to_wait_here()
        try:
            if self._mailbox.is_empty:
                self._driver.want(self.request_id)
            answer = self._mailbox.pop_all()[self.request_id]
            if isinstance(answer, BaseException):
                raise answer
            return answer
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the request if it still runs; in a child of `os.fork` only the iteration."""
        if not self._closed:
            self._closed = True
            if not self._driver.process.is_here or (self.result is not None and self.result.finished):
                return
            self.result = self._driver.call(lambda: self._driver.drop(self.request_id)) or self.result

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()
