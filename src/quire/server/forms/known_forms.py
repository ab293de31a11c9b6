"""The forms in which families of models write calls by name.

A model may write another version's form than its template, or leave a marker out: each of these forms is read in any
answer, where it names a tool that is offered. A template that writes calls by their ids alone (Kimi K2), which
`learn_named_form` cannot tell, has its form from here.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.forms.named_form import NamedForm, ParameterForm

__all__ = ["KNOWN_FORMS", "known_form"]

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_XML = ParameterForm("\n<parameter=", ">\n", "\n</parameter>")
_DSML = ParameterForm(
    '\n<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>", '" string="false">'
)

KNOWN_FORMS = {
    "Mistral v11": NamedForm("", "[TOOL_CALLS]", ("[CALL_ID]", "[ARGS]"), "", ""),
    "Mistral v13": NamedForm("", "[TOOL_CALLS]", ("[ARGS]",), "", ""),
    "Mistral without [ARGS]": NamedForm("", "[TOOL_CALLS]", ("",), "", ""),
    "DeepSeek V3, R1": NamedForm(
        _DEEPSEEK[0],
        f"{_DEEPSEEK[1]}function<｜tool▁sep｜>",
        ("\n```json\n",),
        f"\n```{_DEEPSEEK[2]}",
        _DEEPSEEK[3],
    ),
    "DeepSeek V3.1": NamedForm(_DEEPSEEK[0], _DEEPSEEK[1], ("<｜tool▁sep｜>",), _DEEPSEEK[2], _DEEPSEEK[3]),
    "DeepSeek V3.2": NamedForm(
        "<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="',
        ('">',),
        "\n</｜DSML｜invoke>",
        "\n</｜DSML｜function_calls>",
        _DSML,
    ),
    "Kimi K2": NamedForm(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        (":", "<|tool_call_argument_begin|>"),
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        call_id="[0-9]",
        whole_id="functions.{name}:{number}",
    ),
    "Qwen3-Coder": NamedForm("", "<tool_call>\n<function=", (">",), "\n</function>\n</tool_call>", "", _XML),
    "Qwen3-Coder without <tool_call>": NamedForm(
        "", "<function=", (">",), "\n</function>\n</tool_call>", "", _XML
    ),
    "Llama 3 with <function=": NamedForm("", "<function=", (">",), "</function>", ""),
    "Llama 3 with <function=, within <tool_call>": NamedForm(
        "", "<tool_call>\n<function=", (">",), "\n</function>\n</tool_call>", ""
    ),
    "GLM 4.5": NamedForm(
        "",
        "<tool_call>",
        ("",),
        "\n</tool_call>",
        "",
        ParameterForm("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    "MiniMax M2": NamedForm(
        "<minimax:tool_call>\n",
        '<invoke name="',
        ('">',),
        "\n</invoke>",
        "\n</minimax:tool_call>",
        ParameterForm('\n<parameter name="', '">', "</parameter>"),
    ),
}


def known_form(added: Iterable[str]) -> NamedForm | None:
    """The form of a model with these added tokens whose template names no function in a call."""
    form = KNOWN_FORMS["Kimi K2"]
    return form if {form.list_begin, form.arguments[1]} <= {*added} else None
