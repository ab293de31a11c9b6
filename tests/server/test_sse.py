"""Events written by hand equal those of the JSON writer."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from quire.server.http.sse import ChoiceEvents, event

HEAD = {"id": "a-1", "object": "text", "created": 7, "model": 'm"\u00e9\\\u2028'}
ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # of lines, for one reader or another
TEXT = st.text(st.characters() | st.sampled_from('"\\\0\x1f\x7f\ud800%{}' + ENDS))


@given(TEXT, st.integers(0, 2000))
def test_plain_pieces_of_text(text: str, index: int) -> None:
    write = ChoiceEvents(HEAD)
    common = {"logprobs": None, "finish_reason": None}
    assert write.text(index, text) == write.choice({"index": index, "text": text, **common})
    made = write.content(index, text)
    assert made == write.choice({"index": index, "delta": {"content": text}, **common})
    assert made.count(b"\n") == 2  # one line and its end
    assert json.loads(made[6:])["model"] == HEAD["model"]


@given(TEXT)
@example(ENDS)
@example(f"\u00e9{ENDS}\U0001f600")
def test_an_event_is_one_line_for_every_reader(text: str) -> None:
    """Python's splitlines ends a line at more characters than any other; httpx reads streams with it."""
    write = ChoiceEvents(HEAD)
    whole = text.encode("utf-8", "replace").decode()
    for one in (
        write.text(0, text),
        write.content(0, text),
        write.choice({"text": text}),
        event({"a": text}),
    ):
        line, empty = one.decode().splitlines()
        assert (line[:6], empty) == ("data: ", "")
        assert whole in values_of(json.loads(line[6:]))


def values_of(data: object) -> list[object]:
    """All that is no object or list, wherever it stands."""
    if isinstance(data, (dict, list)):
        inner = data.values() if isinstance(data, dict) else data
        return [value for one in inner for value in values_of(one)]
    return [data]
