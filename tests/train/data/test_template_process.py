# SPDX-License-Identifier: Apache-2.0
"""Chat templates that loop, nest or allocate without end are T605 within seconds."""

import gc
import os
import signal
import time

import pytest

from tessera.errors import TokenizerError
from tessera.train.data import template_process
from tessera.train.data.chat_template import Conversation, ConversationError
from tessera.train.data.template_process import TemplateProcess

CHAT = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
HI = Conversation([{"role": "user", "content": "hi"}])
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}" + (
    "{% endfor %}{% endfor %}"
)
DOUBLING = "{% macro m0() %}aaaaaaaa{% endmacro %}" + "".join(
    f"{{% macro m{n} () %}}{{{{ m{n - 1}() }}}}{{{{ m{n - 1}() }}}}{{% endmacro %}}"
    for n in range(1, 60)
)
SHARED = "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60


def error_of(source: str) -> str:
    with pytest.raises(TokenizerError) as raised:
        TemplateProcess(source, {}).render(HI)
    return str(raised.value)


def test_a_template_renders_as_in_this_process():
    template = TemplateProcess(CHAT, {"eos_token": "</s>"})
    twice = HI._replace(messages=[*HI.messages, *HI.messages])
    assert template.render(twice) == "hi</s>hi</s>"
    answer = {"role": "assistant", "content": "😀\u2028\n"}
    answered = HI._replace(messages=[*HI.messages, answer])
    text, answers = template.render_answers(answered)
    assert (text, answers) == ("hi</s>😀\u2028\n</s>", [(6, 13, True)])
    with pytest.raises(ConversationError, match="no answer"):
        template.render_answers(HI)
    assert template.render(HI) == "hi</s>"


@pytest.mark.full
@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        "{{ 'a' * 10**10 }}",
        "{{ messages[0].content * 10**10 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 9**(9**9) }}",
        "{{ 'aa'|indent(10**10, first=true) }}",
        "{{ ([messages[0].content * 9999] * 9999)|join('b' * 9999) }}",
        f"{DOUBLING}{{{{ m59() }}}}",
        f"{SHARED}{{{{ x }}}}",
        f"{SHARED}{{{{ x|tojson }}}}",
        SHARED + SHARED.replace("x", "y") + "{{ x == y }}",
        "{{ raise_exception('a' * 10**10) }}",
    ],
)
def test_a_template_without_end_is_refused_within_seconds(source):
    start = time.monotonic()
    assert error_of(source).startswith("[T605] the tokenizer's chat template ")
    assert time.monotonic() - start < 60  # 5 s of CPU time, on a busy machine


@pytest.mark.slow(reason="it compiles deep templates")
@pytest.mark.parametrize(
    "source",
    [
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "{{ " + "-" * 5000 + "1 }}",
        "{{ 1" + " + 1" * 20000 + " }}",
        "{% nonsense %}",
        "{{ 1 / 0 }}{{",
    ],
    ids=lambda source: source[:12],
)
def test_a_template_that_nests_too_deeply_is_refused(source):
    assert "[T605] the tokenizer's chat template cannot be compiled" in error_of(source)


def test_limits_are_of_one_conversation(monkeypatch):
    assert template_process._checked("a") == "a"
    monkeypatch.setattr(template_process, "_LONGEST_TEXT", 9)
    with pytest.raises(TokenizerError, match="10 characters for one conversation, of"):
        template_process._checked("a" * 10)


def test_memory_is_limited():
    source = "{{ messages[0].content * 10**10 }}"
    template = TemplateProcess(source, {})
    for _ in range(2):
        with pytest.raises(TokenizerError, match="more than 512 MiB"):
            template.render(HI)


@pytest.mark.slow(reason="it starts two processes")
def test_a_template_that_is_ended_is_an_error_and_none_survives():
    template = TemplateProcess(CHAT, {})
    process = template._worker.process
    process.send_signal(signal.SIGPROF)  # as the kernel does after 5 s of CPU time
    for _ in range(2):
        with pytest.raises(TokenizerError, match="more than 5 s"):
            template.render(HI)
    other = TemplateProcess(CHAT, {})
    number = other._worker.process.pid
    os.kill(number, 0)
    del other
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
