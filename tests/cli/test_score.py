"""`quire score`: windows that score each token once, the texts of a file, the table and the JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support import tiny_llm
from support.command_line import Run, runner

from quire.cli import score as verb
from quire.cli.score import windows


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with a tiny model of bytes whose longest sequence has 256 tokens."""
    monkeypatch.setattr(verb, "open_llm", lambda config: tiny_llm.llm())

    return runner(capsys, monkeypatch, "score")


@pytest.mark.parametrize("prefix", [[], [99]], ids=["plain", "prefix"])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_windows_score_each_token_once(size: int, prefix: list[int]) -> None:
    for stride in range(1, size):
        for num_tokens in range(1, 25):
            tokens = list(range(num_tokens))
            for start in range(num_tokens):
                scored: list[int] = []
                for part in windows(tokens, size, stride, prefix, start):
                    assert len(part.token_ids) <= size
                    own = range(part.start, len(part.token_ids))
                    assert [part.token_ids[place] for place in own] == [place + part.offset for place in own]
                    assert part.offset == 0 or part.start > 0, "a window's first token has no score"
                    scored += [place + part.offset for place in own]
                assert scored == list(range(start, num_tokens))


def test_all_but_the_first_window_have_enough_before_them() -> None:
    for part in windows(range(100), 10, 4)[1:]:
        assert part.start >= 6


def test_the_table(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n")
    (tmp_path / "b.jsonl").write_text('"some text"\n\n[1, 2, 3]\n{"prompt": "some text", "start": 5}\n')
    status, out, _ = run(str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"))
    assert status == 0
    head, *rows, whole = out.splitlines()
    assert head.split() == ["tokens", "cached", "perplexity", "text"]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [
        ("23", str(tmp_path / "a.txt")),
        ("9", f"{tmp_path / 'b.jsonl'}:1"),
        ("3", f"{tmp_path / 'b.jsonl'}:3"),
        ("9", f"{tmp_path / 'b.jsonl'}:4"),
    ]
    assert whole.split()[0] == "44"
    assert "all: 36 tokens scored in" in whole
    assert whole.endswith("tokens/s")


def test_json_and_long_texts(run: Run, tmp_path: Path) -> None:
    """In windows the first tokens have the scores of the text alone, and all have one."""
    text = "".join(f"line {number}: some words\n" for number in range(40))
    (tmp_path / "a.txt").write_text(text)
    status, out, _ = run(str(tmp_path / "a.txt"), "--json", "--window", "64", "--stride", "16")
    assert status == 0
    found = json.loads(out)
    (row,) = found["texts"]
    assert len(row["token_ids"]) == len(text) == len(row["logprobs"])
    assert row["logprobs"][0] is None
    assert None not in row["logprobs"][1:]
    assert row["num_scored"] == len(text) - 1 == found["num_scored"]
    assert found["perplexity"] == pytest.approx(math.exp(-found["total"] / found["num_scored"]))
    assert found["tokens_per_second"] > 0
    with tiny_llm.llm() as llm:
        assert llm.score(text[:64])[0].logprobs == row["logprobs"][:64]
        second = llm.score(text[16:80], start=48)[0].logprobs
        assert second[48:] == row["logprobs"][64:80]


def test_a_single_token(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    status, out, _ = run(str(tmp_path / "a.txt"))
    assert status == 0
    assert out.splitlines()[1].split()[2] == "-"
    status, out, _ = run(str(tmp_path / "a.txt"), "--json")
    assert json.loads(out)["texts"][0]["perplexity"] is None


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        ("", [], "expected text, got none - in {file}"),
        ("\n\n", [], "expected at least one text, got none"),
        ("{", [], "got '{{'"),
        ("{}", [], 'expected a JSON string, a list of token ids, or {{"prompt": either, "start": N}} at {file}:1'),
        ("[-1]", [], "at {file}:1, got '[-1]'"),
        ("[true]", [], "at {file}:1, got '[true]'"),
        ("[]", [], "expected text, got none - in {file}:1"),
        ('{"prompt": "a", "start": -1}', [], "expected a start of 0 or more at {file}:1, got -1"),
        ('{"prompt": "a", "start": 1}', [], "expected a start before the last of 1 tokens, got 1 - in {file}:1"),
        ('"a"', ["--window", "1"], "expected a window of 2 to 256 tokens, got 1 - in --window"),
        ('"a"', ["--window", "257"], "got 257 - in --window"),
        ('"a"', ["--window", "4", "--stride", "4"], "expected a stride of 1 to 3, less than the window, got 4"),
        ('"a"', ["--stride", "0"], "got 0 - in --stride"),
    ],
)  # fmt: skip
def test_bad_files_and_arguments(
    run: Run, tmp_path: Path, content: str, arguments: list[str], says: str
) -> None:
    file = tmp_path / ("a.txt" if not content else "a.jsonl")
    file.write_text(content)
    status, out, err = run(str(file), *arguments)
    assert (status, out) == (2, "")
    assert says.format(file=file) in err


def test_a_file_that_is_not_there(run: Run) -> None:
    status, _, err = run("no-such-file.txt")
    assert status == 2
    assert "expected a readable UTF-8 file of texts, got no-such-file.txt" in err


def test_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        def read(self) -> str:
            return "some text"

    monkeypatch.setattr("sys.stdin", Input())
    assert run("-")[1].splitlines()[1].split()[0] == "9"
