# SPDX-License-Identifier: Apache-2.0
"""Checks the value of a record: a text, or a conversation."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tessera.errors.untrusted_text import check_json_values
from tessera.train.data.chat_template import Conversation, Message

TOOLS: Final = "tools"
TEMPLATE_ARGUMENTS: Final = "chat_template_kwargs"

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


def unused_keys(record: Mapping[str, Any], conversation: Conversation) -> Iterable[str]:
    """Keys that change what others would train on, and that are not read."""
    yield from (key for key in UNUSED if record.get(key) is not None)
    for message in conversation.messages:
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
