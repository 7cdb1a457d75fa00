# SPDX-License-Identifier: Apache-2.0
"""A chat template in a process of its own, whose time and memory are limited.

A template is a program that comes with a tokenizer. Jinja's sandbox keeps it from files
and from Python, but not from endless loops and huge strings, some of which a single
operation makes. So the kernel ends the process of a template that takes too long, and
gives it no more memory.
"""

import json
import pickle
import signal
import subprocess
import weakref
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any, Final

from tessera.errors import TokenizerError
from tessera.train.data.chat_template import (
    Answer,
    Conversation,
    ConversationError,
    unread,
)
from tessera.train.data.template_worker import CPU_SECONDS, FIX
from tessera.train.runtime.python_process import module_command

_WORKER: Final = "tessera.train.data.template_worker"


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
        self._lock = Lock()
        self._process = subprocess.Popen(
            module_command(_WORKER),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process
        )
        weakref.finalize(self, _end, self._process)
        self._ask(source, dict(special_tokens), tool_source)

    def render(
        self, conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation.

        Raises:
          ConversationError: The template does not accept it.
          TokenizerError: [T605] the template takes too much time or memory, or writes
            too much.
        """
        return self._ask("render", _plain(conversation), add_generation_prompt)

    def render_answers(self, conversation: Conversation) -> tuple[str, list[Answer]]:
        """The text of a conversation, and where the assistant's answers are in it.

        Raises:
          ConversationError: As ``ChatTemplate.render_answers``.
          TokenizerError: [T605] as ``render``.
        """
        text, answers = self._ask("render_answers", _plain(conversation))
        return text, [Answer(*answer) for answer in answers]

    def unread(self, conversation: Conversation) -> Iterator[str]:
        """What the template never names, and so leaves out of the text."""
        return unread(self._source, conversation)

    def _ask(self, *request: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        content = pickle.dumps(request)
        with self._lock:
            try:
                stdin.write(content)
                stdin.flush()
                answer = stdout.readline()
            except BrokenPipeError:
                answer = b""
        if not answer.endswith(b"\n"):
            raise _died(self._process.wait())
        # JSON and no pickle: a template that leaves its sandbox gains nothing.
        kind, value = json.loads(answer.decode("utf-8", "surrogatepass"))
        if kind == "conversation":
            raise ConversationError(value)
        if kind == "tokenizer":
            what, got, fix = value
            raise TokenizerError(what, got=got, fix=fix)
        return value


def _plain(conversation: Conversation) -> Conversation:
    """The same in containers that can be sent."""
    messages, tools, arguments = conversation
    return Conversation([*messages], tools, dict(arguments))


def _died(code: int) -> TokenizerError:
    if code == -signal.SIGPROF:
        return TokenizerError(
            "the tokenizer's chat template takes too long",
            got=f"more than {CPU_SECONDS:g} s for one conversation",
            fix=FIX,
        )
    return TokenizerError(
        "the tokenizer's chat template has ended the process that runs it",
        got=f"exit code {code}",
        fix=FIX,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
