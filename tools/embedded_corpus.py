"""The training text of the embedded model: the running Python's standard library, as text, chats, tokens and windows.

The split into training and held-out files is stable (a hash of each file's path); the tokenizer sees no held-out
file. Not here: the model, and how it is trained.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = [
    "CONTEXT",
    "IM_END",
    "VOCABULARY",
    "Windows",
    "chat_documents",
    "is_held_out",
    "read_corpus",
    "train_tokenizer",
]

# Folders left out: other people's packages, tests, generated tables.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
SKIPPED |= {"lib2to3", "encodings", "pydoc_data"}
HELD_OUT_PERCENT = 4
VOCABULARY = 4096
CONTEXT = 2048
END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Line breaks, then a line's whole indentation, then words (with one leading space, dot or
# underscore), numbers and punctuation. A prompt may so end after any line, or after its indent.
SPLIT = r"\n+|(?<![^\n])[ \t]+|[ ._]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ ]+(?!\S)|\s"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read_corpus() -> tuple[dict[str, str], dict[str, str]]:
    """The standard library's sources as (training files, held-out files), by relative path."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    seen: set[str] = set()
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib)
        if SKIPPED.intersection(name.parts[:-1]) or name.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 200 or text in seen:
            continue
        seen.add(text)
        (held_out if is_held_out(name.as_posix()) else train)[name.as_posix()] = text
    return train, held_out


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def chat_documents(train: dict[str, str]) -> list[str]:
    """Short documented functions, each as one turn of chat: its docstring asks for its code."""
    documents = []
    for text in train.values():
        lines = text.split("\n")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
                continue
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            summary = " ".join(doc.split("\n\n")[0].split())
            if len(code) < 500 and 20 < len(summary) < 200:
                documents.append(
                    f"{IM_START}user\nWrite the function `{node.name}`. {summary}{IM_END}\n"
                    f"{IM_START}assistant\n{code}{IM_END}\n"
                )
    return documents


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[IM_START, IM_END],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


class Windows:
    """Batches of windows over one token stream; each epoch visits every window once."""

    def __init__(self, stream: torch.Tensor, length: int) -> None:
        self.stream, self.length = stream, length
        self.per_epoch = (len(stream) - 1) // length - 1
        self.epoch, self.order, self.shift = -1, torch.empty(0), 0

    def take(self, first: int, count: int) -> torch.Tensor:
        rows = []
        for index in range(first, first + count):
            epoch, slot = divmod(index, self.per_epoch)
            if epoch != self.epoch:
                generator = torch.Generator().manual_seed(epoch * 10_000 + self.length)
                self.order = torch.randperm(self.per_epoch, generator=generator)
                self.shift = int(torch.randint(self.length, (1,), generator=generator))
                self.epoch = epoch
            start = self.shift + int(self.order[slot]) * self.length
            rows.append(self.stream[start : start + self.length + 1])
        return torch.stack(rows)
