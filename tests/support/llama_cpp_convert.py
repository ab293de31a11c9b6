"""Writes GGUF files of the models in `llama_cpp_cases.py` by llama.cpp's own converter, with a small vocabulary.

    PYTHONPATH=$LLAMA_CPP/gguf-py:$LLAMA_CPP:tests python tests/support/llama_cpp_convert.py FOLDER NAME ...

$LLAMA_CPP: its source. Writes FOLDER/NAME.gguf; of one that cannot be written, FOLDER/NAME.error says why.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
from conversion import ModelType, get_model_architecture, get_model_class  # pyright: ignore[reportMissingImports]
from conversion.base import ModelBase  # pyright: ignore[reportMissingImports]
from support.llama_cpp_cases import CASES, NUM_WORDS, make
from transformers.convert_slow_tokenizer import bytes_to_unicode


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        try:
            with tempfile.TemporaryDirectory() as saved:
                make(name).save_pretrained(saved)
                convert(Path(saved), folder / f"{name}.gguf", name)
        except Exception:
            (folder / f"{name}.gguf").unlink(missing_ok=True)
            (folder / f"{name}.error").write_text(traceback.format_exc())


def convert(saved: Path, file: Path, name: str) -> None:
    case = CASES[name]
    config = saved / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **case.saved}))
    (saved / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": dict.fromkeys(map(str, range(NUM_WORDS)))}, "added_tokens": []})
    )  # of Gemma 3 the converter counts its words
    kind = get_model_class(get_model_architecture(ModelBase.load_hparams(saved, False), ModelType.TEXT))
    kind.no_mtp = True  # transformers' models have no layers that predict further tokens
    model = kind(saved, gguf.LlamaFileType.ALL_F32, file)
    of_file: Any = getattr(model, "impl", model)  # Mistral 3 hands on to another
    write = {"bpe": write_bpe, "spm": write_spm}[case.vocabulary]

    def set_vocab() -> None:  # the converter's keys are written by then
        write(of_file.gguf_writer)
        for key, value in case.keys.items():
            change(of_file.gguf_writer, f"{case.architecture}.{key}", value)

    of_file.set_vocab = set_vocab
    of_file.modify_tensors = partial(with_returned, of_file.modify_tensors)
    model.write()


def change(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    for fields in writer.kv_data:
        fields.pop(key, None)
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
        writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


def with_returned(modify: Any, *arguments: Any) -> Iterator[Any]:
    """Where the generator returns its last tensors (StableLM's norms of heads), they are lost in its caller."""
    last = yield from modify(*arguments)
    yield from last or ()


def write_bpe(writer: gguf.GGUFWriter) -> None:
    letters = list(bytes_to_unicode().values())
    special = ["<pad>", "<s>", "</s>"]
    words = [*special, *letters, "ab", "abc"]
    unused = [f"[PAD{i}]" for i in range(NUM_WORDS - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*words, *unused])
    writer.add_token_types([3] * len(special) + [1] * (len(words) - len(special)) + [5] * len(unused))
    writer.add_token_merges(["a b", "ab c"])
    write_special(writer)


def write_spm(writer: gguf.GGUFWriter) -> None:
    special = ["<unk>", "<s>", "</s>"]
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "ab", "abc"]
    unused = [f"[PAD{i}]" for i in range(NUM_WORDS - len(special) - len(letters) - len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*special, *letters, *words, *unused])
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0] * len(unused))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words) + [5] * len(unused))
    write_special(writer)


def write_special(writer: gguf.GGUFWriter) -> None:
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


if __name__ == "__main__":
    main()
