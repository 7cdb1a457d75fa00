# SPDX-License-Identifier: Apache-2.0
"""A chat template in a process of its own, whose time and memory are limited.

A template is a program that comes with a tokenizer. Jinja's sandbox keeps it from files
and from Python, but not from endless loops and huge strings, some of which a single
operation makes.
"""

import signal
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from tessera.errors import TokenizerError
from tessera.train.data.chat_template import (
    AnswerRange,
    ChatTemplate,
    Conversation,
    ConversationError,
    unread,
)
from tessera.train.data.worker_process import WorkerDiedError, WorkerProcess

# For one conversation. Those that people train on take milliseconds and a few MiB.
_CPU_SECONDS: Final = 5.0
_MEMORY_BYTES: Final = 512 * 2**20
_LONGEST_TEXT: Final = 2**25
_FIX: Final = (
    "correct chat_template.jinja or tokenizer_config.json, or use another tokenizer"
)


class TemplateProcess:
    """A ``ChatTemplate`` in another process; the arguments and methods are the same.

    Raises:
      TokenizerError: [T605] it is no template, jinja2 is not installed, or compiling
        it takes too much time or memory.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str = ""
    ) -> None:
        self._source = f"{source}\n{tool_source}"
        self._template = source, tuple(special_tokens.items()), tool_source
        self._worker = WorkerProcess(_MEMORY_BYTES, _CPU_SECONDS)
        self._call(_check, *self._template)

    def render(
        self, conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation.

        Raises:
          ConversationError: The template does not accept it.
          TokenizerError: [T605] the template takes too much time or memory, or writes
            too much.
        """
        prompt = add_generation_prompt
        return self._call(_render, self._template, conversation, prompt)

    def render_answers(
        self, conversation: Conversation, first: int = 0
    ) -> tuple[str, list[AnswerRange]]:
        """The text of a conversation, and where the answers from a message on are.

        Raises:
          ConversationError: As ``ChatTemplate.render_answers``.
          TokenizerError: [T605] as ``render``.
        """
        text, answers = self._call(_render_answers, self._template, conversation, first)
        return text, [AnswerRange(*answer) for answer in answers]

    def unread(self, conversation: Conversation) -> Iterator[str]:
        """What the template never names, and so leaves out of the text."""
        return unread(self._source, conversation)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            value, refusal = self._worker.call(_refusals, function, *arguments)
        except MemoryError as error:
            raise TokenizerError(
                "the tokenizer's chat template takes too much memory",
                got=f"more than {_MEMORY_BYTES // 2**20} MiB for one conversation",
                fix=_FIX,
            ) from error
        except WorkerDiedError as error:
            raise _died(error.exit_code) from error
        if refusal:
            raise ConversationError(refusal)
        return value


def _died(code: int) -> TokenizerError:
    if code == -signal.SIGPROF:
        return TokenizerError(
            "the tokenizer's chat template takes too long",
            got=f"more than {_CPU_SECONDS:g} s for one conversation",
            fix=_FIX,
        )
    return TokenizerError(
        "the tokenizer's chat template has ended the process that runs it",
        got=f"exit code {code}",
        fix=_FIX,
    )


# --- in the other process


def _refusals(function: Any, *arguments: Any) -> tuple[Any, str]:
    """What a function returns, or why the template does not accept a conversation."""
    try:
        return function(*arguments), ""
    except ConversationError as error:
        return None, str(error)


@cache
def _compiled(
    source: str, special_tokens: tuple[tuple[str, str], ...], tool_source: str
) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens), tool_source)


def _check(*template: Any) -> None:
    _compiled(*template)


def _render(template: Any, conversation: Conversation, prompt: bool) -> str:
    made = _compiled(*template)
    return _checked(made.render(conversation, add_generation_prompt=prompt))


def _render_answers(
    template: Any, conversation: Conversation, first: int
) -> tuple[str, list[AnswerRange]]:
    text, answers = _compiled(*template).render_answers(conversation, first)
    return _checked(text), answers


def _checked(text: str) -> str:
    if len(text) > _LONGEST_TEXT:
        raise TokenizerError(
            "the tokenizer's chat template writes too much",
            got=f"{len(text):,} characters for one conversation, of {_LONGEST_TEXT:,}",
            fix=_FIX,
        )
    return text
