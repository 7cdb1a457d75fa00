# SPDX-License-Identifier: Apache-2.0
"""Writes conversations as text by a tokenizer's chat template, as Transformers does.

The answers in that text are the ``{% generation %}`` blocks of the template. Without
them, an answer is what the template adds to the prompt of all messages before it; if
the template writes those messages in another way later, there is no telling.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

from tessera.errors import TokenizerError
from tessera.train.data.optional_libraries import import_extra

Message = Mapping[str, Any]


class AnswerRange(NamedTuple):
    """The characters of an answer, [begin, end), and whether it is to be learned."""

    begin: int
    end: int
    is_learned: bool


class Conversation(NamedTuple):
    """What a template is given.

    Attributes:
      messages: Each with ``role`` and ``content``.
      tools: The schemas of the functions that the assistant may call.
      arguments: Other variables of the template, such as ``enable_thinking``.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] | None = None


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
      tool_source: The template of conversations with tools, if it is another one.

    Raises:
      TokenizerError: [T605] it is no template, or jinja2 is not installed.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str = ""
    ) -> None:
        sandbox = import_extra(
            "jinja2.sandbox", "a chat template", "tokenizers", TokenizerError
        )
        # Transformers' settings; a template depends on them for every line break.
        self._environment: Any = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", self._generation_tag()],
        )
        # Jinja's own filter writes characters of HTML as escapes.
        self._environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._environment.globals["raise_exception"] = _raise
        self._environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        both = source + tool_source
        self._has_generation = bool(re.search(r"\{%-?\s*generation\s*-?%\}", both))
        try:
            self._template: Any = self._environment.from_string(source)
            self._tool_template: Any = (
                self._environment.from_string(tool_source)
                if tool_source
                else self._template
            )
        except MemoryError:
            raise
        # A template that nests too deeply is a RecursionError or Python's SyntaxError.
        except Exception as error:
            raise TokenizerError(
                "the tokenizer's chat template cannot be compiled",
                got=f"line {getattr(error, 'lineno', '?')}: {str(error)[:200]}",
                fix="correct chat_template.jinja or tokenizer_config.json",
            ) from error

    def render(
        self, conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation.

        Raises:
          ConversationError: The template does not accept it.
        """
        return self._render(conversation, add_generation_prompt, "", "")

    def render_answers(
        self, conversation: Conversation, first: int = 0
    ) -> tuple[str, list[AnswerRange]]:
        """The text of a conversation, and where the assistant's answers are in it.

        Args:
          conversation: The conversation.
          first: The message from which on answers are looked for.

        Raises:
          ConversationError: The template does not accept it; there are no answers; or
            it is not known where they are.
        """
        text = self.render(conversation)
        find = self._marked if self._has_generation else self._added
        found = find(conversation, text, first)
        answers = [one for one in found if one.begin < one.end]
        if not answers:
            after = " after its last message of a user" if first else ""
            raise ConversationError(f"it has no answer of the role 'assistant'{after}")
        return text, answers

    def _marked(
        self, conversation: Conversation, text: str, first: int
    ) -> Iterator[AnswerRange]:
        parts = self._blocks(conversation)
        # A filter may have seen a mark, or a message may have one.
        if "".join(parts) != text or len(re.findall(f"[{_BEGIN}{_END}]", text)):
            raise ConversationError("the template changes its generation blocks")
        is_exact = bool(first) or any(map(is_unlearned, conversation.messages))
        count = len(parts) // 2
        numbers = [0] * count
        if is_exact:
            numbers = self._messages_of_blocks(conversation, count)
        end = 0
        for number, part in enumerate(parts):
            begin, end = end, end + len(part)
            if number % 2 and (of := numbers[number // 2]) >= first:
                message = conversation.messages[of]
                yield AnswerRange(begin, end, not is_unlearned(message))

    def _blocks(self, conversation: Conversation) -> list[str]:
        """The text outside and inside of generation blocks, in turns."""
        marked = self._render(conversation, False, _BEGIN, _END)
        return re.split(f"[{_BEGIN}{_END}]", marked)

    def _messages_of_blocks(self, conversation: Conversation, count: int) -> list[int]:
        """Which message each block is of."""
        messages = conversation.messages
        numbers = list[int]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                part = conversation._replace(messages=messages[: number + 1])
                blocks = len(self._blocks(part)) // 2
                numbers += [number] * (blocks - len(numbers))
        if len(numbers) != count:
            raise ConversationError(
                "the template writes other generation blocks when more messages "
                "follow, so it is not known which message a block is of"
            )
        return numbers

    def _added(
        self, conversation: Conversation, text: str, first: int
    ) -> Iterator[AnswerRange]:
        messages = conversation.messages
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and number >= first:
                before = conversation._replace(messages=messages[:number])
                with_answer = conversation._replace(messages=messages[: number + 1])
                prompt = self.render(before, add_generation_prompt=True)
                answered = self.render(with_answer)
                if not (text.startswith(answered) and answered.startswith(prompt)):
                    raise ConversationError(
                        f"the template writes the messages up to {number + 1} in "
                        "another way when more follow, so the answer is not known"
                    )
                is_learned = not is_unlearned(message)
                yield AnswerRange(len(prompt), len(answered), is_learned)

    def _render(
        self, conversation: Conversation, prompt: bool, begin: str, end: str
    ) -> str:
        messages, tools, arguments = conversation
        template = self._template if tools is None else self._tool_template
        values: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **(arguments or {}),
            "messages": [_normalized(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": prompt,
            "generation_marks": (begin, end),
        }
        try:
            text: str = template.render(values)
        except MemoryError:
            raise
        # Expressions raise anything for values that the template did not expect.
        except Exception as error:
            raise ConversationError(f"the chat template stops: {error}") from error
        _check(text, messages)
        return text

    def _generation_tag(self) -> type:
        """The tag ``{% generation %}``, which puts marks around what it contains."""
        from jinja2 import ext, nodes

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


def unread(source: str, conversation: Conversation) -> Iterator[str]:
    """What a template never names, and so leaves out of the text."""
    messages, tools, arguments = conversation
    keys = [key for key, value in (arguments or {}).items() if value is not None]
    keys += ["tools"] if tools else []
    if any(message.get("tool_calls") for message in messages):
        keys.append("tool_calls")
    names = (key for key in keys if not re.search(rf"\b{re.escape(key)}\b", source))
    yield from (f"{key} (not in the chat template)" for key in names)


def is_unlearned(message: Message) -> bool:
    """Whether it is an answer with a weight of 0."""
    return message["role"] == "assistant" and message.get("weight") == 0


def _normalized(message: Message) -> Message:
    """A message without what is null; its reasoning under the two keys that are read.

    As Transformers does: templates write null as the word None, or stop.
    """
    message = {key: value for key, value in message.items() if value is not None}
    values = [message[key] for key in _REASONING if key in message]
    if not values:
        return message
    return {"thinking": values[0], **message, "reasoning_content": values[0]}


def _check(text: str, messages: Sequence[Message]) -> None:
    """Refuse what no template means to write.

    Raises:
      ConversationError: The text has a list of parts as Python prints it, or half of a
        surrogate pair, which no tokenizer takes.
    """
    lists = (m["content"] for m in messages if isinstance(m.get("content"), list))
    if any(str(content) in text for content in lists):
        raise ConversationError(
            "the chat template takes content that is text, not a list of parts"
        )
    if any("\ud800" <= character <= "\udfff" for character in set(text)):
        raise ConversationError("it has half of a surrogate pair, no character")


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _raise(message: str) -> NoReturn:
    raise ConversationError(message)
