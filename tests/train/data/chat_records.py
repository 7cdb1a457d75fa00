# SPDX-License-Identifier: Apache-2.0
"""Random chat records, and a template that reads all that they may have."""

from random import Random
from typing import Any

# `generation` stands around all that the assistant writes.
TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>tools\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- macro parts(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable %}
        {%- for part in content %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if enable_thinking is not defined or enable_thinking %}
            {{- '<think>' + (message.reasoning_content or '') + '</think>' }}
        {%- endif %}
        {{- parts(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- call.function.name + ' ' + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- parts(message.content) + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# None begins with a line end: a token might hold that and the one before an answer.
_WORDS = ("hello", "  all", "é😀", "a\n", "why?", "<&>", "None", "{{ x }}", "[]")


def _text(draw: Random) -> str:
    return "".join(draw.choices(_WORDS, k=draw.randint(0, 4)))


def _content(draw: Random) -> Any:
    if draw.random() < 0.7:
        return _text(draw)
    return [{"type": "text", "text": _text(draw)} for _ in range(draw.randint(1, 3))]


def _answer(draw: Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(draw)}
    if draw.random() < 0.4:
        arguments = {"city": _text(draw), "days": draw.randint(0, 9), "at": None}
        call = {
            "type": "function",
            "function": {"name": "rain", "arguments": arguments},
        }
        message["tool_calls"] = [call] * draw.randint(1, 2)
        message["content"] = draw.choice([None, message["content"]])
        if draw.random() < 0.3:
            del message["content"]
    if draw.random() < 0.3:
        name = draw.choice(["reasoning_content", "thinking", "reasoning"])
        message[name] = draw.choice([None, _text(draw)])
    if draw.random() < 0.5:
        message["weight"] = draw.choice([0, 1, None])
    return message


def draw_record(seed: int) -> dict[str, Any]:
    """A record with messages, and often tools and arguments of the template."""
    draw = Random(seed)
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": _text(draw)})
    for _ in range(draw.randint(1, 3)):
        role = draw.choice(["user", "user", "tool"])
        messages += [{"role": role, "content": _content(draw)}, _answer(draw)]
    record: dict[str, Any] = {"id": seed, "messages": messages}
    if draw.random() < 0.6:
        properties = {"city": {"type": "string", "enum": [_text(draw), None]}}
        rain = {"name": "rain", "parameters": {"properties": properties}}
        tools = [{"type": "function", "function": rain}]
        record["tools"] = draw.choice([tools, tools * 2, [], None])
    if draw.random() < 0.6:
        arguments = {"enable_thinking": draw.random() < 0.5, "other": None}
        record["chat_template_kwargs"] = draw.choice([arguments, {}, None])
    return record
