"""Call formats of model families, by name.

A model may write another version's format than its template, or omit a marker: each of these formats is read in any
answer, where it names an offered tool. A template that writes calls by their ids alone (Kimi K2), which
`learn_tagged_format` cannot learn, gets its format from here.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.outputs.tagged_call_format import ParameterFormat, TaggedCallFormat

__all__ = ["KNOWN_FORMATS", "known_format"]

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_XML = ParameterFormat("\n<parameter=", ">\n", "\n</parameter>")
_DSML = ParameterFormat(
    '\n<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>", '" string="false">'
)

KNOWN_FORMATS = {
    "Mistral v11": TaggedCallFormat("", "[TOOL_CALLS]", ("[CALL_ID]", "[ARGS]"), "", ""),
    "Mistral v13": TaggedCallFormat("", "[TOOL_CALLS]", ("[ARGS]",), "", ""),
    "Mistral without [ARGS]": TaggedCallFormat("", "[TOOL_CALLS]", ("",), "", ""),
    "DeepSeek V3, R1": TaggedCallFormat(
        _DEEPSEEK[0],
        f"{_DEEPSEEK[1]}function<｜tool▁sep｜>",
        ("\n```json\n",),
        f"\n```{_DEEPSEEK[2]}",
        _DEEPSEEK[3],
    ),
    "DeepSeek V3.1": TaggedCallFormat(
        _DEEPSEEK[0], _DEEPSEEK[1], ("<｜tool▁sep｜>",), _DEEPSEEK[2], _DEEPSEEK[3]
    ),
    "DeepSeek V3.2": TaggedCallFormat(
        "<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="',
        ('">',),
        "\n</｜DSML｜invoke>",
        "\n</｜DSML｜function_calls>",
        _DSML,
    ),
    "Kimi K2": TaggedCallFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        (":", "<|tool_call_argument_begin|>"),
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        call_id="[0-9]",
        whole_id="functions.{name}:{number}",
    ),
    "Qwen3-Coder": TaggedCallFormat(
        "", "<tool_call>\n<function=", (">",), "\n</function>\n</tool_call>", "", _XML
    ),
    "Qwen3-Coder without <tool_call>": TaggedCallFormat(
        "", "<function=", (">",), "\n</function>\n</tool_call>", "", _XML
    ),
    "Llama 3 with <function=": TaggedCallFormat("", "<function=", (">",), "</function>", ""),
    "Llama 3 with <function=, within <tool_call>": TaggedCallFormat(
        "", "<tool_call>\n<function=", (">",), "\n</function>\n</tool_call>", ""
    ),
    "GLM 4.5": TaggedCallFormat(
        "",
        "<tool_call>",
        ("",),
        "\n</tool_call>",
        "",
        ParameterFormat("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    "MiniMax M2": TaggedCallFormat(
        "<minimax:tool_call>\n",
        '<invoke name="',
        ('">',),
        "\n</invoke>",
        "\n</minimax:tool_call>",
        ParameterFormat('\n<parameter name="', '">', "</parameter>"),
    ),
}


def known_format(added: Iterable[str]) -> TaggedCallFormat | None:
    """The format of a model with these added tokens whose template writes no function's name in a call."""
    kimi = KNOWN_FORMATS["Kimi K2"]
    return kimi if {kimi.list_begin, kimi.arguments[1]} <= {*added} else None
