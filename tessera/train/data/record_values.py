# SPDX-License-Identifier: Apache-2.0
"""Checks the value of a record: a text, a conversation, a prompt or two answers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tessera.errors import did_you_mean
from tessera.train.data.chat_template import Conversation, Message
from tessera.train.files.untrusted_json import check_json_values

TOOLS: Final = "tools"
TEMPLATE_ARGUMENTS: Final = "chat_template_kwargs"
COMPLETION: Final = "completion"
LABEL: Final = "label"

# What other trainers read beside the messages of a record, and this one does not.
UNUSED: Final = (
    "documents",
    "functions",
    "function_call",
    "parallel_tool_calls",
    "system",
    "images",
    "videos",
    "audio",
    "completion",
    "chosen",
    "rejected",
    "weight",
    "loss_mask",
)
_UNUSED_OF_MESSAGES: Final = ("train", "trainable", "loss", "loss_weight", "mask")
# Transformers' own parameters, and what the trainer gives the template.
_RESERVED: Final = frozenset(
    {"messages", "conversation", "tools", "add_generation_prompt", "chat_template"}
    | {"continue_final_message", "tokenize", "generation_marks"}
)


class UnusableRecordError(Exception):
    """Why a record cannot be used, in a sentence."""


def text_value(value: Any, key: str) -> str:
    """The text under a key.

    Raises:
      UnusableRecordError: It is none.
    """
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(error) from error
    if not isinstance(value, str):
        reason = f"its {key!r} is {kind_of(value)}, not text"
        raise UnusableRecordError(reason)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        reason = "its text has half of a surrogate pair, which is not a character"
        raise UnusableRecordError(reason) from error
    return value


def conversation_value(record: Mapping[str, Any], key: str) -> Conversation:
    """The messages under a key, with the tools and arguments of the same record.

    Raises:
      UnusableRecordError: They are not messages.
    """
    messages = record[key]
    if not isinstance(messages, list) or not messages:
        reason = f"its {key!r} is {kind_of(messages)}, not a list of messages"
        raise UnusableRecordError(reason)
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            reason = f"message {number} of its {key!r} is {kind_of(message)}"
            raise UnusableRecordError(f"{reason}, not an object")
        _check_message(message, number, key)
    tools = _parsed(record.get(TOOLS))
    if tools is not None and not _are_objects(tools):
        reason = f"its {TOOLS!r} is {kind_of(tools)}, not a list of objects"
        raise UnusableRecordError(reason)
    return Conversation(messages, tools, _arguments(record))


def _arguments(record: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = _parsed(record.get(TEMPLATE_ARGUMENTS))
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        reason = f"its {TEMPLATE_ARGUMENTS!r} is {kind_of(arguments)}, not an object"
        raise UnusableRecordError(reason)
    if reserved := sorted(_RESERVED.intersection(arguments)):
        reason = f"its {TEMPLATE_ARGUMENTS!r} sets {', '.join(reserved)}"
        raise UnusableRecordError(f"{reason}, which the trainer sets")
    return arguments


def _check_message(message: Message, number: int, key: str) -> None:
    what = f"message {number} of its {key!r}"
    for name in ("role", "content"):
        is_content = name == "content"
        if is_content and message.get(name) is None and message.get("tool_calls"):
            continue
        if name not in message:
            raise UnusableRecordError(f"{what} has no {name!r}")
        if not (is_content and _are_objects(message[name])):
            text_value(message[name], f"{key}[{number - 1}].{name}")
    weight = message.get("weight")
    if message["role"] == "assistant" and weight not in (None, 0, 1):
        reason = f"{what} has the weight {str(weight)[:40]}, and only 0 and 1 are known"
        raise UnusableRecordError(reason)


def messages_keys(record: Mapping[str, Any]) -> list[str]:
    """The keys of a record that have messages."""
    return [
        str(key)[:40]
        for key, value in record.items()
        if value and _are_objects(value) and {"role", "content"} <= value[0].keys()
    ]


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _parsed(value: Any) -> Any:
    """A value that may be JSON in a text, as tables store what differs by row."""
    if not isinstance(value, str):
        return value
    try:
        check_json_values(value)
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # the caller says what it should be


def prompt_value(
    record: Mapping[str, Any], key: str
) -> tuple[str, Conversation | None]:
    """The text under a key, or nothing and the messages that end before an answer.

    Raises:
      UnusableRecordError: It is neither, or empty.
    """
    if not isinstance(record[key], list):
        if not (text := text_value(record[key], key)):
            raise UnusableRecordError(f"its {key!r} is empty")
        return text, None
    conversation = conversation_value(record, key)
    if conversation.messages[-1]["role"] == "assistant":
        reason = f"the last message of its {key!r} is an answer of the assistant"
        raise UnusableRecordError(f"{reason}, which a prompt leaves to the model")
    return "", conversation


def json_columns(record: Mapping[str, Any], first: str, ignored: set[str]) -> str:
    """A record as JSON, dates as text, without bytes, and one of its keys first."""

    def as_json(value: Any) -> str | None:
        if not isinstance(value, bytes):
            return str(value)
        ignored.add("bytes, such as images")
        return None

    return json.dumps({first: record[first], **record}, default=as_json)


class Preference(NamedTuple):
    """A better and a worse answer, each with the prompt before it.

    Attributes:
      shared: The characters or messages of the prompt, with which both begin.
      chosen: The better one; None where there is only a worse one.
      rejected: The other one. Both are None where an answer is empty.
    """

    shared: int
    chosen: str | Conversation | None
    rejected: str | Conversation | None


def preference_value(
    record: Mapping[str, Any], chosen_key: str, rejected_key: str, prompt_key: str
) -> Preference:
    """Two answers to a prompt, in the layouts of the Hub's common data sets.

        prompt, chosen, rejected     texts, or lists of messages
        chosen, rejected             lists of messages that begin alike; a text under
                                     the prompt's key is that of one of these
        chosen, rejected             texts that begin alike, where that key is empty
        prompt, completion, label    one answer, and whether it is a good one

    Raises:
      UnusableRecordError: It has none, or it is not known where they begin.
    """
    keys, label = [chosen_key, rejected_key], None
    if chosen_key not in record and COMPLETION in record:
        keys, label = [COMPLETION], record.get(LABEL)
        if label not in (0, 1):
            reason = f"its {LABEL!r} is {kind_of(label)}, not true or false"
            raise UnusableRecordError(reason)
    are_chats = isinstance(record.get(keys[0]), list)
    # What two texts begin with is no prompt where that may be under another key.
    is_explicit = isinstance(record.get(prompt_key), list) if are_chats else prompt_key
    is_explicit = is_explicit or label is not None
    sides: list[Any] = [_text_or_messages(record, key, are_chats) for key in keys]
    if is_explicit:
        prompt = _text_or_messages(record, prompt_key, are_chats)
    else:
        prompt = sides[0][: common_length(*sides)]
        if not are_chats:  # as in TRL: the first token of an answer has the space
            prompt = prompt.removesuffix(" ")
    size = len(prompt)
    # The answers of some data sets have the messages of the prompt, too.
    is_whole = are_chats and all(side[:size] == prompt for side in sides)
    if is_explicit and not is_whole:
        sides = [prompt + side for side in sides]
    answers = [side[size:] for side in sides]
    if are_chats:
        _check_prompt(record.get(prompt_key), prompt, answers)
    if not prompt:
        raise UnusableRecordError("its prompt is empty, or its answers have two")
    if any(map(_is_empty, answers)):
        return Preference(0, None, None)
    if are_chats:
        chat = conversation_value(record, keys[0])
        sides = [chat._replace(messages=side) for side in sides]
    if label is not None:
        sides.insert(int(label), None)
    return Preference(size, *sides)


def _text_or_messages(record: Mapping[str, Any], key: str, are_chats: bool) -> Any:
    if key not in record:
        raise no_key(record, key, "preferences")
    if are_chats:
        return [*conversation_value(record, key).messages]
    return text_value(record[key], key)


def _check_prompt(
    text: Any, prompt: Sequence[Message], answers: Iterable[Sequence[Message]]
) -> None:
    """See that an answer of the assistant follows a prompt that has this text."""
    if (
        text
        and isinstance(text, str)
        and text not in [m.get("content") for m in prompt]
    ):
        reason = "the text of its prompt is no message with which both answers begin"
        raise UnusableRecordError(reason)
    if any(answer and answer[0]["role"] != "assistant" for answer in answers):
        reason = "its prompt is not followed by answers of the assistant"
        raise UnusableRecordError(reason)


def _is_empty(answer: str | Sequence[Message]) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    values = [one.get(key) for one in answer for key in ("content", "tool_calls")]
    return not any(str(value or "").strip() for value in values)


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of elements with which two sequences begin alike.

    Example:
      >>> common_length("abc", "abd")
      2
    """
    pairs = enumerate(zip(one, other, strict=False))
    ends = (number for number, (a, b) in pairs if a != b)
    return next(ends, min(len(one), len(other)))


def no_key(record: Mapping[str, Any], key: str, source: str) -> UnusableRecordError:
    """The reason of a record without a key, with the one that was probably meant."""
    near = did_you_mean(key, [str(name)[:40] for name in list(record)[:12]])
    if source == "text" and (chats := messages_keys(record)):
        near = f"for its conversation, write data.messages_key={chats[0]}"
    return UnusableRecordError(f"it has no key {key!r}; {near}")


def unused_keys(
    record: Mapping[str, Any], conversation: Conversation | None = None
) -> Iterable[str]:
    """Keys that change what others would train on, and that are not read."""
    yield from (key for key in UNUSED if record.get(key) is not None)
    for message in conversation.messages if conversation else ():
        for key in _UNUSED_OF_MESSAGES:
            if message.get(key) is not None:
                yield f"{key} of messages"
        if message["role"] != "assistant" and message.get("weight") is not None:
            yield "weight of messages that are not the assistant's"


def not_utf8(error: UnicodeDecodeError) -> UnusableRecordError:
    """The reason of bytes that are not UTF-8."""
    byte = error.object[error.start]
    return UnusableRecordError(f"it is not UTF-8: byte 0x{byte:02x}")


def kind_of(value: Any) -> str:
    """What a value is, in JSON's words."""
    if value == []:
        return "an empty array"
    kinds = {
        **{list: "an array", dict: "an object", str: "text"},
        **{bool: "true or false", int: "a number", float: "a number"},
    }
    other = f"of the type {type(value).__name__}"
    return "null" if value is None else kinds.get(type(value), other)
