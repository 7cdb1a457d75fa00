# SPDX-License-Identifier: Apache-2.0
"""Writes conversations as text by a tokenizer's chat template, as Transformers does.

The answers in that text are the ``{% generation %}`` blocks of the template. Without
them, an answer is what the template adds to the prompt of all messages before it; if
the template writes those messages in another way later, there is no telling.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from tessera.errors import TokenizerError
from tessera.training.data.extras import import_extra

Message = Mapping[str, Any]
# The characters of an answer, [begin, end).
Span = tuple[int, int]

# Unicode reserves these two for use inside of a program.
_BEGIN: Final = "\ufdd0"
_END: Final = "\ufdd1"
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


class ConversationError(ValueError):
    """A conversation that the template cannot write, or whose answers are unknown."""


class ChatTemplate:
    """A compiled template.

    Args:
      source: The template.
      special_tokens: Names of tokens that it may use, such as ``bos_token``.

    Raises:
      TokenizerError: [T605] it is no template, or jinja2 is not installed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        sandbox = import_extra(
            "jinja2.sandbox", "a chat template", "tokenizers", TokenizerError
        )
        self._jinja: Any = import_extra(
            "jinja2", "a chat template", "tokenizers", TokenizerError
        )
        # Transformers' settings; a template depends on them for every line break.
        self._environment: Any = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", self._generation_tag()],
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = self._raise
        self._environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        self._has_generation = bool(re.search(r"\{%-?\s*generation\s*-?%\}", source))
        try:
            self._template: Any = self._environment.from_string(source)
        except self._jinja.TemplateError as error:
            raise TokenizerError(
                "the tokenizer's chat template cannot be compiled",
                got=f"line {getattr(error, 'lineno', '?')}: {error}",
                fix="correct chat_template.jinja or tokenizer_config.json",
            ) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation.

        Raises:
          ConversationError: The template does not accept it.
        """
        return self._render(messages, add_generation_prompt, "", "")

    def render_answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a conversation, and where the assistant's answers are in it.

        Raises:
          ConversationError: The template does not accept it; there are no answers; or
            it is not known where they are.
        """
        text = self.render(messages)
        find = self._marked if self._has_generation else self._added
        spans = [(begin, end) for begin, end in find(messages, text) if begin < end]
        if not spans:
            raise ConversationError("it has no answer of the role 'assistant'")
        return text, spans

    def _marked(self, messages: Sequence[Message], text: str) -> list[Span]:
        marked = self._render(messages, False, _BEGIN, _END)
        parts = re.split(f"[{_BEGIN}{_END}]", marked)
        # A filter may have seen a mark, or a message may have one.
        if "".join(parts) != text or len(re.findall(f"[{_BEGIN}{_END}]", text)):
            raise ConversationError("the template changes its generation blocks")
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part))
        return [*zip(ends[1::2], ends[2::2], strict=False)]

    def _added(self, messages: Sequence[Message], text: str) -> list[Span]:
        spans: list[Span] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self.render(messages[:number], add_generation_prompt=True)
                answered = self.render(messages[: number + 1])
                if not (text.startswith(answered) and answered.startswith(prompt)):
                    raise ConversationError(
                        f"the template writes the messages up to {number + 1} in "
                        "another way when more follow, so the answer is not known; "
                        "mark it by {% generation %} in the template"
                    )
                spans.append((len(prompt), len(answered)))
        return spans

    def _render(
        self, messages: Sequence[Message], prompt: bool, begin: str, end: str
    ) -> str:
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                generation_marks=(begin, end),
                **self._special_tokens,
            )
        # What an expression of a template may raise for values that it did not expect.
        except (
            *(self._jinja.TemplateError, TypeError, ValueError, AttributeError),
            *(LookupError, ArithmeticError, RecursionError),
        ) as error:
            raise ConversationError(f"the chat template stops: {error}") from error

    def _raise(self, message: str) -> None:
        raise self._jinja.TemplateError(message)

    def _generation_tag(self) -> type:
        """The tag ``{% generation %}``, which puts marks around what it contains."""
        nodes = import_extra("jinja2.nodes", "a template", "tokenizers", TokenizerError)
        ext = import_extra("jinja2.ext", "a template", "tokenizers", TokenizerError)

        def parse(_: Any, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = nodes.Name("generation_marks", "load")
            begin, end = (
                nodes.Output([nodes.Getitem(marks, nodes.Const(i), "load")])
                for i in (0, 1)
            )
            # Its own scope, as in Transformers: what the block sets ends with it.
            return nodes.Scope([begin, *body, end]).set_lineno(line)

        members = {"tags": {"generation"}, "parse": parse}
        return type("Generation", (ext.Extension,), members)


def _with_reasoning(message: Message) -> Message:
    """A message with its reasoning under the two keys that templates read."""
    values = [message[key] for key in _REASONING if message.get(key) is not None]
    if not values:
        return message
    return {"thinking": values[0], **message, "reasoning_content": values[0]}


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter writes characters of HTML as escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
