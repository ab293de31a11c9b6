"""The forms in which families of models write calls by name.

A model may write another version's form than its template, or leave a marker out: each of these forms is read in any
answer, where it names a tool that is offered. A template that writes calls by their ids alone (Kimi K2), which
`learn_named_form` cannot tell, has its form from here.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.outputs.tagged_call_format import ParameterFormat, TaggedCallFormat

__all__ = ["KNOWN_FORMS", "known_form"]

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_XML = ParameterFormat("\n<parameter=", ">\n", "\n</parameter>")
_DSML = ParameterFormat(
    '\n<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>", '" string="false">'
)

KNOWN_FORMS = {
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


def known_form(added: Iterable[str]) -> TaggedCallFormat | None:
    """The form of a model with these added tokens whose template names no function in a call."""
    form = KNOWN_FORMS["Kimi K2"]
    return form if {form.list_begin, form.arguments[1]} <= {*added} else None
