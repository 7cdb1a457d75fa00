# SPDX-License-Identifier: Apache-2.0
"""The process that compiles and renders a chat template; see ``template_process``.

It reads pickled requests from standard input and answers each by a line of JSON.
"""

import json
import os
import pickle
import resource
import signal
import sys
from typing import Any, Final

from tessera.errors import TokenizerError
from tessera.train.data.chat_template import ChatTemplate, ConversationError

# For one conversation. Those that people train on take milliseconds and a few MiB.
CPU_SECONDS: Final = 5.0
_MEMORY_BYTES: Final = 512 * 2**20
_LONGEST_TEXT: Final = 2**25
FIX: Final = (
    "correct chat_template.jinja or tokenizer_config.json, or use another tokenizer"
)


def main() -> None:
    """Compile the template of the first request, and render those that follow."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    template: ChatTemplate | None = None

    def answer(request: tuple[Any, ...]) -> Any:
        nonlocal template
        if template is None:
            template = ChatTemplate(*request)
            return None
        return _render(template, *request)

    while (request := _next_request()) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        line = _line(answer, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(line + b"\n")
        answers.flush()


def _next_request() -> tuple[Any, ...] | None:
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:
        return None


def _render(template: ChatTemplate, method: str, *arguments: Any) -> Any:
    if method == "render_answers":
        text, answers = template.render_answers(*arguments)
        return _checked(text), answers
    conversation, prompt = arguments
    return _checked(template.render(conversation, add_generation_prompt=prompt))


def _checked(text: str) -> str:
    if len(text) > _LONGEST_TEXT:
        raise TokenizerError(
            "the tokenizer's chat template writes too much",
            got=f"{len(text):,} characters for one conversation, of {_LONGEST_TEXT:,}",
            fix=FIX,
        )
    return text


def _line(answer: Any, request: tuple[Any, ...]) -> bytes:
    """What ``answer`` returns or raises, as one line."""
    kind: str
    value: Any
    try:
        kind, value = "value", answer(request)
    except ConversationError as error:
        kind, value = "conversation", str(error)
    except TokenizerError as error:
        kind, value = "tokenizer", (error.what, error.got, error.fix)
    except MemoryError:
        kind, value = (
            "tokenizer",
            (
                "the tokenizer's chat template takes too much memory",
                f"more than {_MEMORY_BYTES // 2**20} MiB for one conversation",
                FIX,
            ),
        )
    return json.dumps([kind, value], ensure_ascii=False).encode(errors="surrogatepass")
