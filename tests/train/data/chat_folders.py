# SPDX-License-Identifier: Apache-2.0
"""Tokenizer folders of small chat models, and conversations for them.

The templates have the constructs of those that are published for Gemma 3, Llama 3,
Qwen 3 and Mistral.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

TEMPLATES = {
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{ '<start_of_turn>model\n' }}
        {%- generation -%}
            {{ message['content'] | trim }}{{ '<end_of_turn>\n' }}
        {%- endgeneration -%}
    {%- else -%}
        {{ '<start_of_turn>' + message['role'] + '\n' + (first if loop.first else '') }}
        {{- message['content'] | trim }}{{ '<end_of_turn>\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
""",
    "llama": """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "qwen": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- set thought = '' %}
            {%- if message.reasoning_content is string %}
                {%- set thought = message.reasoning_content %}
            {%- endif %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content.lstrip('\n') + '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""",
    "mistral": """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% else %}
{{- raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{% endfor %}""",
}
SPECIAL = {
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "llama": [
        *("<|begin_of_text|>", "<|eot_id|>"),
        *("<|start_header_id|>", "<|end_header_id|>"),
    ],
    "qwen": ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
}


def turns(*contents: str, system: str = "") -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(contents)
    pairs = [*zip(roles, contents, strict=False)]
    if system:
        pairs = [("system", system), *pairs]
    return [{"role": role, "content": content} for role, content in pairs]


CONVERSATIONS = {
    "one turn": turns("Why  hello?", "hello all"),
    "two turns": turns("hi", "hello", "é😀\nall?", "  naïve 😀!\n"),
    "a system message": turns("hi", "hello", system="Be well."),
    "no answer yet": turns("hi", "hello", "all?"),
    "roles in another order": turns("hi", "hello")[::-1],
    "names of special tokens": turns("a<eos></s><|im_end|>b", "c<end_of_turn>d"),
    "reasoning": [
        *turns("hi"),
        {"role": "assistant", "content": "hello", "reasoning_content": "all\n"},
    ],
}


def template_of(family: str, *, marked: bool) -> str:
    """A template, with or without its generation blocks."""
    source = TEMPLATES[family]
    if not marked:  # blocks with the same effect on the spaces around them
        source = re.sub(r"(?<=[ -])generation(?=[ -])", "if true", source)
        source = re.sub(r"(?<=[ -])endgeneration(?=[ -])", "endif", source)
    return source


def write_folder(
    folder: Path, family: str, *, marked: bool, trim_offsets: bool = True
) -> Path:
    """A tokenizer of bytes with a few merges, and the special tokens of a family."""
    library = pytest.importorskip("tokenizers")
    space, newline = "\u0120", "\u010a"
    pairs = [("h", "e"), ("l", "l"), (space, space), (newline, newline), ("he", "ll")]
    pieces = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    pieces += [left + right for left, right in pairs]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    # Llama 3 trims: it cuts spaces off the offsets of tokens.
    trim = library.processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.post_processor = trim
    tokenizer.add_special_tokens(SPECIAL[family])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = SPECIAL[family]
    begin = {"__type": "AddedToken", "content": names[0], "special": True}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if family == "qwen" else begin,
        "eos_token": names[1],
        "pad_token": names[1],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = template_of(family, marked=marked)
    (folder / "chat_template.jinja").write_text(template)
    return folder
