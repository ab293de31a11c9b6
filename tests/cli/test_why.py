"""`quire why`: where two recorded requests part, by the tokens that a server would make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import app, main

CHAT = {
    "messages": [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "It is a fox."},
        {"role": "user", "content": "And now?"},
    ]
}


def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], first: Any, second: Any) -> dict[str, Any]:
    for name, body in (("a.json", first), ("b.json", second)):
        (tmp_path / name).write_text(json.dumps(body))
    app(["why", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_the_words_where_two_chats_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = json.loads(json.dumps(CHAT).replace("a fox", "the dog"))
    found = compared(tmp_path, capsys, CHAT, other)
    assert found["before"].endswith("It is")
    assert found["first"].startswith(" a fox")
    assert found["second"].startswith(" the dog")
    assert found["common_tokens"] + found["to_compute"] == found["second_tokens"]
    app(["why", str(tmp_path / "a.json"), str(tmp_path / "b.json")], standalone_mode=False)
    assert f"they part at token {found['common_tokens']}" in capsys.readouterr().out


def test_a_chat_that_only_grew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"prompt": [5, 6, 7, 8]}
    found = compared(tmp_path, capsys, first, {"prompt": [5, 6, 7, 8, 9]})
    assert (found["common_tokens"], found["to_compute"]) == (4, 1)
    found = compared(tmp_path, capsys, first, first)
    assert (found["common_tokens"], found["to_compute"]) == (4, 1)  # the last one always


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"input": "x"}, "messages or a prompt"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"messages": "x"}, "`messages`"),
        ([1], "messages or a prompt"),
    ],
)
def test_another_body_is_refused(
    body: Any,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(body))
    monkeypatch.setattr("sys.argv", ["quire", "why", str(path), str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
