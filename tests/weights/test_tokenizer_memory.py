"""A tokenizer's memory: predicted from its file, equal to the library's use, without its Python copies."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from transformers import Qwen2Tokenizer

from quire.weights.load import load
from quire.weights.tokenizer import Vocabulary, count_words, planned_vocabulary, release_copies

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ODD = ['"', "\\", '\\"', 'a"b', "\\\\", "end\\", '"merges"', "merges", "vocab", "é", "\n", '": [']


def pairs(num: int) -> list[tuple[str, str]]:
    """Merges of letters, of their results, and so on."""
    found, words, number = [], list(LETTERS), 0
    while len(found) < num:
        left = words[number // 26]
        for right in LETTERS[: num - len(found)]:
            found.append((left, right))
            words.append(left + right)
        number += 26
    return found


def bpe(num_merges: int, odd: list[str] = ODD) -> BPE:
    merges = pairs(num_merges)
    words = [*odd, *LETTERS, *(left + right for left, right in merges)]
    return BPE({word: number for number, word in enumerate(words)}, merges)


def words_of(num: int) -> list[str]:
    return [*ODD, *(left + right for left, right in pairs(num))]


MODELS: dict[str, Any] = {
    "BPE": lambda num: bpe(num),
    "WordPiece": lambda num: WordPiece({word: at for at, word in enumerate(words_of(num))}, unk_token="é"),
    "WordLevel": lambda num: WordLevel({word: at for at, word in enumerate(words_of(num))}, unk_token="é"),
    "Unigram": lambda num: Unigram([(word, -1.0) for word in words_of(num)], 0, False),
}


@pytest.mark.parametrize("pretty", [True, False], ids=["pretty", "compact"])
@pytest.mark.parametrize("kind", MODELS)
def test_words_and_merges_are_counted_in_the_file(kind: str, pretty: bool, tmp_path: Path) -> None:
    made = Tokenizer(MODELS[kind](100))
    made.add_special_tokens(["<|end|>", '<"quoted">'])
    path = tmp_path / "tokenizer.json"
    made.save(str(path), pretty=pretty)
    found = count_words(path)
    assert found is not None
    # Keys behind the last list of a model are told as a word or two.
    assert made.get_vocab_size(with_added_tokens=False) == pytest.approx(found.num_words, abs=2)
    assert (found.num_merges, found.num_added) == (100 if kind == "BPE" else 0, 2)
    assert found.is_unigram == (kind == "Unigram")
    if kind == "BPE":
        told = json.loads(path.read_text())
        told["model"]["merges"] = [
            " ".join(pair) for pair in told["model"]["merges"]
        ]  # as older files have them
        path.write_text(json.dumps(told))
        assert count_words(path) == found


# What a tokenizer of a file holds, by the C library's counts, in a process that does nothing else.
HELD = """
import ctypes
import sys
from tokenizers import Tokenizer

class Mallinfo(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in ["arena", "a", "b", "c", "mapped", "d", "e", "used", "f", "g"]]

def bytes_in_use():
    found = library.mallinfo2()
    return found.used + found.mapped

library = ctypes.CDLL(None)
if not hasattr(library, "mallinfo2"):
    sys.exit(3)
library.mallinfo2.restype = Mallinfo
Tokenizer.from_str('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
before = bytes_in_use()
made = Tokenizer.from_file(sys.argv[1])
print(bytes_in_use() - before)
"""


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "WordLevel"])  # Unigram's tree is estimated
@pytest.mark.parametrize("num", [3000, 20000])
def test_the_library_holds_what_the_counts_say(kind: str, num: int, tmp_path: Path) -> None:
    made, path = Tokenizer(MODELS[kind](num)), tmp_path / "tokenizer.json"
    made.save(str(path))
    ran = subprocess.run([sys.executable, "-c", HELD, str(path)], capture_output=True, text=True, timeout=120)
    if ran.returncode == 3:
        pytest.skip("the C library does not tell what is in use")
    found = Vocabulary(made.get_vocab_size(), num if kind == "BPE" else 0)
    assert found.table_bytes == pytest.approx(int(ran.stdout), rel=0.05), ran.stderr


def qwen(folder: Path, **options: Any) -> Any:
    merges: Any = pairs(500)
    made = Qwen2Tokenizer(
        vocab={word: number for number, word in enumerate([*LETTERS, *(a + b for a, b in pairs(500))])},
        merges=merges,
        **options,
    )
    made.save_pretrained(folder)
    return made


def test_a_loaded_tokenizer_keeps_no_copies_and_does_what_it_did(tmp_path: Path) -> None:
    from support.quantized_checkpoints import tiny

    plain = qwen(tmp_path)
    tiny().save_pretrained(tmp_path)
    loaded = load(tmp_path).tokenizer
    assert type(loaded) is Qwen2Tokenizer
    assert not {"_vocab", "_merges"} & vars(loaded).keys()
    text = "abcabcb bacbca<|endoftext|>"
    assert loaded(text)["input_ids"] == plain(text)["input_ids"]
    assert loaded.get_vocab() == plain.get_vocab()
    assert pickle.loads(pickle.dumps(loaded))(text)["input_ids"] == plain(text)["input_ids"]
    loaded.save_pretrained(tmp_path / "again")
    assert Qwen2Tokenizer.from_pretrained(tmp_path / "again")(text)["input_ids"] == plain(text)["input_ids"]


def test_what_a_method_reads_stays(tmp_path: Path) -> None:
    class Reads(Qwen2Tokenizer):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)

        @property
        def num_pairs(self) -> int:
            return (lambda: len(self._merges))()

    qwen(tmp_path)
    tokenizer: Any = Reads.from_pretrained(tmp_path)
    release_copies(tokenizer)
    assert tokenizer.num_pairs == 500
    assert "_vocab" not in vars(tokenizer)


def test_a_folder_without_tokenizer_json_is_reckoned_by_its_vocabulary(tmp_path: Path) -> None:
    assert planned_vocabulary(str(tmp_path), None, 1000) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    found = planned_vocabulary(str(tmp_path), None, 1000)
    assert found is not None
    assert (found.num_words, found.is_counted) == (1000, False)
    assert found.label.startswith("about, 1000 words")
