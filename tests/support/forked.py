"""Running a function in a child of `os.fork`."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

from quire.errors import OtherProcessError

_LIMIT_S = 60


def in_child(function: Callable[[], Any]) -> Any:
    """What it returns there. Fails where the child does not end by itself, with its own status."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_LIMIT_S)  # a child that waits for ever ends by a signal
        try:
            found = ("returned", function())
        except BaseException:
            found = ("raised", traceback.format_exc())
        os.write(writer, pickle.dumps(found))
        os._exit(7)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 7, f"the child ended with {status}"
    kind, value = pickle.loads(text)
    assert kind == "returned", value
    return value


def refusal(call: Callable[[], Any]) -> str:
    """The message of the OtherProcessError that `call` raises; "" where it raises none."""
    try:
        call()
    except OtherProcessError as error:
        return str(error)
    return ""
