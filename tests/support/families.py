"""Tokenizers with the added tokens and the chat templates of known families, and a tiny random model for each.

The vocabulary is the embedded model's; the markers of calls and thoughts are tokens of their own, special or not as in
the family's own tokenizer, and each template writes calls in the family's form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from support.architectures import randomize
from tokenizers import AddedToken
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from quire import LLM
from quire.server.messages import render
from quire.server.schemas.chat_bodies import ChatMessage, Tool
from quire.server.settings import ServerLimits
from quire.weights.load import EMBEDDED

__all__ = ["FAMILIES", "llm", "model", "tokenizer", "written"]

_QWEN_HEAD = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call return <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% endif %}"""

_QWEN = (
    _QWEN_HEAD
    + """{%- for message in messages %}
{%- if message.role == "tool" %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.tool_calls %}{{ '<|im_start|>' + message.role }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

# The last answer is shown with its thoughts; a call's arguments may be text.
_QWEN3 = (
    _QWEN_HEAD
    + """{%- for message in messages %}
{%- if message.role == "assistant" %}
{{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}
{{- message.content.lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
)

# Thoughts are opened in the prompt.
_QWQ = _QWEN.replace(
    "<|im_start|>assistant\\n' }}{% endif %}", "<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

_HERMES = {
    "default": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "tool_use": _QWEN.replace("# Tools", "You are a function calling AI model."),
}

_MISTRAL = """{%- for message in messages %}
{%- if message.role == "user" %}
{%- if loop.last and tools %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif message.role == "tool" %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' }}{{ message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""

_LLAMA3 = """{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- MARKER + '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{{- message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# From version 11 on: a call's name and arguments behind markers of their own, until version 13 with its id.
_MISTRAL11 = """{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == "assistant" %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call must have an id of 9 characters or numbers.') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
{{- arguments if arguments is string else arguments | tojson }}
{%- endfor %}{{ eos_token }}
{%- elif message.role == "tool" %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- endif %}
{%- endfor %}"""

# Tells of no tools; writes calls whose arguments are text.
_DEEPSEEK = """{%- set ns = namespace(system='') %}
{%- for message in messages %}{% if message.role == "system" %}{% set ns.system = ns.system + message.content %}
{%- endif %}{% endfor %}{{ ns.system }}
{%- for message in messages %}
{%- if message.role == "user" %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == "assistant" %}{{ '<｜Assistant｜>HEAD' + message.content }}
{%- if message.tool_calls is defined %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- 'GAP' if not loop.first else '' }}{{ '<｜tool▁call▁begin｜>' + CALL + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ eos_token }}
{%- elif message.role == "tool" %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>HEAD' }}{% endif %}"""
_DEEPSEEK3 = (
    _DEEPSEEK.replace("HEAD", "")
    .replace("GAP", "\\n")
    .replace(
        "CALL +",
        "call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' +",
    )
)
_DEEPSEEK31 = (
    _DEEPSEEK.replace("HEAD", "</think>")
    .replace("GAP", "")
    .replace("CALL +", "call.function.name + '<｜tool▁sep｜>' + call.function.arguments +")
)

# Arguments one by one, strings as they are.
_QWEN3_CODER = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
<function>{{ tool.function | tojson }}</function>{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls is defined %}{{ '<|im_start|>assistant' }}
{%- if message.content | trim %}{{ '\\n' + message.content | trim + '\\n' }}{% endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- (value | tojson) if value is mapping or (value is sequence and value is not string) else (value | string) }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# A name, and its arguments one by one between markers that are tokens.
_GLM = """[gMASK]<sop>{%- if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>{%- endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}{{ '<|assistant|>\\n<think></think>' }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{ '</arg_value>' }}
{%- endfor %}{{ '\\n</tool_call>' }}
{%- endfor %}
{%- elif message.role == "tool" %}<|observation|>
<tool_response>
{{ message.content }}
</tool_response>
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n<think></think>' }}{% endif %}"""

# Calls by their ids alone, which have the name in them.
_KIMI = """{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}{{ '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
{%- if message.role == "assistant" and message.tool_calls %}{{ message.content }}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>
{%- elif message.role == "tool" %}{{ '## Return of ' + message.tool_call_id + '\\n' + message.content }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""


@dataclass(frozen=True)
class Family:
    template: str | dict[str, str]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    eos: str = "<|im_end|>"


_CALLS = ("<tool_call>", "</tool_call>")
_THOUGHTS = ("<think>", "</think>")
_LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_MISTRAL_TOKENS = tuple(
    f"[{name}]"
    for name in (
        "INST",
        "/INST",
        "TOOL_CALLS",
        "AVAILABLE_TOOLS",
        "/AVAILABLE_TOOLS",
        "TOOL_RESULTS",
        "/TOOL_RESULTS",
    )
)
_MISTRAL11_TOKENS = (*_MISTRAL_TOKENS, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]")
_DEEPSEEK_TOKENS = tuple(
    f"<｜{name}｜>"
    for name in (
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁output▁begin",
        "tool▁output▁end",
        "tool▁sep",
    )
)

FAMILIES = {
    "qwen2.5": Family(_QWEN, plain=_CALLS),
    "qwen3": Family(_QWEN3, plain=(*_CALLS, "<tool_response>", "</tool_response>", *_THOUGHTS)),
    "qwq": Family(_QWQ, plain=(*_CALLS, *_THOUGHTS)),
    "hermes": Family(_HERMES, plain=(*_CALLS, "<tools>", "</tools>")),
    "mistral": Family(_MISTRAL, special=_MISTRAL_TOKENS, eos="<|endoftext|>"),
    "llama3": Family(_LLAMA3.replace("MARKER + ", ""), special=_LLAMA3_TOKENS, eos="<|eot_id|>"),
    "python_tag": Family(
        _LLAMA3.replace("MARKER", "'<|python_tag|>'"), special=_LLAMA3_TOKENS, eos="<|eot_id|>"
    ),
    "mistral11": Family(_MISTRAL11, special=_MISTRAL11_TOKENS, eos="<|endoftext|>"),
    "mistral13": Family(
        _MISTRAL11.replace("'[CALL_ID]' + call.id + ", ""), special=_MISTRAL11_TOKENS, eos="<|endoftext|>"
    ),
    "deepseek3": Family(_DEEPSEEK3, plain=_DEEPSEEK_TOKENS, eos="<|endoftext|>"),
    "deepseek3.1": Family(_DEEPSEEK31, plain=(*_DEEPSEEK_TOKENS, *_THOUGHTS), eos="<|endoftext|>"),
    "qwen3-coder": Family(_QWEN3_CODER, plain=_CALLS),
    "glm4.5": Family(
        _GLM,
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        plain=(*_CALLS, *_THOUGHTS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|user|>",
    ),
    "kimi-k2": Family(
        _KIMI,
        special=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
        plain=tuple(
            f"<|tool_{name}|>"
            for name in (
                "calls_section_begin",
                "calls_section_end",
                "call_begin",
                "call_argument_begin",
                "call_end",
            )
        ),
    ),
}


@cache
def tokenizer(name: str) -> Any:
    family = FAMILIES[name]
    made = AutoTokenizer.from_pretrained(EMBEDDED)
    made.add_tokens(
        [AddedToken(one, special=True, normalized=False) for one in family.special], special_tokens=True
    )
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.plain])
    made.eos_token = family.eos
    made.chat_template = family.template
    return made


def written(name: str, *calls: tuple[str, dict[str, Any]], content: str = "") -> str:
    """The text of an answer with these calls as the family's template writes it."""
    told = [
        {"id": "abcdefghi", "type": "function", "function": {"name": one, "arguments": json.dumps(arguments)}}
        for one, arguments in calls
    ]
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": content, "tool_calls": told},
    ]
    words, tools = tokenizer(name), [{"type": "function", "function": {"name": "f"}}]
    text = render(
        words,
        [ChatMessage.model_validate(one) for one in messages],
        ServerLimits(),
        [Tool.model_validate(one) for one in tools],
    )
    text = text[text.rindex("Hello") + len("Hello") :]
    begins = ("<|assistant|>\n<think></think>", "<|im_assistant|>assistant<|im_middle|>")
    for marker in (
        *begins,
        "[/INST]",
        "</think>",
        "<｜Assistant｜>",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
    ):
        text = text.replace(marker, "")
    return text.replace(words.eos_token, "")


def llm(name: str, **options: Any) -> LLM:
    return LLM((model(name), tokenizer(name)), **{"kv_memory": "4MiB", "max_batch_tokens": 2048, **options})


def model(name: str, *, max_positions: int = 4096) -> Any:
    words = tokenizer(name)
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=max_positions,
        eos_token_id=words.eos_token_id,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    made = Qwen3ForCausalLM(config).float().eval()
    randomize(made)
    return made
