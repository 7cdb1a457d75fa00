# SPDX-License-Identifier: Apache-2.0
"""Reads the records of a unit one after another, in bounded memory.

A text file is one record, or several of ``MOST_TEXT_BYTES`` each. JSON lines have one
in each line, tables one in each row: a text, or the messages of a conversation.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from tessera.errors import (
    BadRecordError,
    DataFormatError,
    did_you_mean,
)
from tessera.train.data.chat_template import Conversation
from tessera.train.data.data_config import RECORDS, DataConfig
from tessera.train.data.file_ranges import (
    JSON_LINES,
    MOST_TEXT_BYTES,
    TEXT,
    Unit,
)
from tessera.train.data.record_values import (
    COMPLETION,
    LABEL,
    TEMPLATE_ARGUMENTS,
    TOOLS,
    UNUSED,
    Preference,
    UnusableRecordError,
    conversation_value,
    json_columns,
    kind_of,
    messages_keys,
    no_key,
    not_utf8,
    preference_value,
    prompt_value,
    text_value,
    unused_keys,
)
from tessera.train.data.table_files import column_names, read_columns
from tessera.train.files.regular_files import check_regular
from tessera.train.files.untrusted_json import check_json_values

# What records have, and how to name its keys.
_OF_RECORDS: Final = {
    "preferences": (
        "pair of answers",
        "use other keys: data.prompt_key=, data.chosen_key= or data.rejected_key=<name>"
        "\nor, of whole texts that begin alike: data.prompt_key=''",
    ),
    "prompts": ("prompt", "use another key: data.prompt_key=<name>"),
}
_MOST_RECORD_BYTES: Final = 64 * 2**20
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Record(NamedTuple):
    """One document.

    Attributes:
      unit: The unit that it is in.
      offset: Where it begins: its first byte in the decompressed file, or its row.
      text: The text; bytes of text files are not decoded. Empty if there are messages.
      conversation: The messages, and what else the chat template is given.
      preference: Of preferences: two texts or conversations that begin alike.
      columns: Of prompts: the whole record as JSON.
    """

    unit: Unit
    offset: int
    text: str | bytes
    conversation: Conversation | None = None
    preference: Preference | None = None
    columns: str = ""

    @property
    def name(self) -> str:
        """Where it is, for messages: ``web.jsonl, line 12``."""
        return f"{self.unit.name}{_position(self.unit, self.offset)}"

    @property
    def first_line(self) -> int:
        """The number of its first line in a text file; 1 in other files."""
        return self.unit.line_at(self.offset) if self.unit.format == TEXT else 1


def _position(unit: Unit, offset: int) -> str:
    """Where a record of a unit begins; slow, because lines have to be counted."""
    if unit.format == TEXT:
        return ""
    if unit.format == JSON_LINES:
        return f", line {unit.line_at(offset)}"
    return f", row {offset + 1}"


def read_records(unit: Unit, config: DataConfig, ignored: set[str]) -> Iterator[Record]:
    """The records of a unit, in order.

    Args:
      unit: What to read.
      config: The settings ``format``, ``text_key`` and ``messages_key``.
      ignored: Collects keys of records that change what others would train on.

    Raises:
      DataNotFoundError: [T601] the file cannot be read.
      DataFormatError: [T606] it is not text.
      BadRecordError: [T607] a record cannot be used.
    """
    return (read() for read in unread_records(unit, config, ignored))


def unread_records(
    unit: Unit, config: DataConfig, ignored: set[str]
) -> Iterator[Callable[[], Record]]:
    """What makes each record or raises T607, so that one can go on after a bad one."""
    if unit.format == TEXT:
        for record in _read_text(unit, check=config.format == "auto"):
            yield partial(Record, *record)
        return
    values = _read_lines if unit.format == JSON_LINES else _read_rows
    for offset, parse in values(unit, config):
        yield partial(_record, unit, offset, parse, config, ignored)


def _record(
    unit: Unit, offset: int, parse: "_Parse", config: DataConfig, ignored: set[str]
) -> Record:
    try:
        values, (key, *others) = parse(), _keys(config)
        if config.name == "preferences":
            pair = preference_value(values, key, others[0], config.prompt_key)
            ignored.update({*unused_keys(values)} - {key, *others})
            return Record(unit, offset, "", preference=pair)
        if key not in values:
            raise no_key(values, key, config.name)
        if config.name == "prompts":
            columns = json_columns(values, key, ignored)
            return Record(unit, offset, *prompt_value(values, key), columns=columns)
        if not config.messages_key:
            return Record(unit, offset, text_value(values[key], key))
        conversation = conversation_value(values, key)
    except UnusableRecordError as error:
        raise bad_record(unit, offset, str(error), config) from error
    ignored.update(unused_keys(values, conversation))
    return Record(unit, offset, "", conversation)


def _keys(config: DataConfig) -> tuple[str, ...]:
    """The keys of a record that are read, the one that it needs first."""
    chat = TOOLS, TEMPLATE_ARGUMENTS
    if config.name == "preferences":
        pair = config.chosen_key, config.rejected_key, config.prompt_key
        return (*pair, COMPLETION, LABEL, *chat)
    if config.name == "prompts":
        return (config.prompt_key,)
    return (config.messages_key, *chat) if config.messages_key else (config.text_key,)


def conversation_setting(path: str) -> str:
    """`` data.messages_key=…`` if the first line of a file has messages, or nothing."""
    file = Path(path)
    with suppress(Exception):  # it need not be such a file
        with Unit(file.name, file, JSON_LINES).open(0) as stream:
            line = stream.readline(_MOST_RECORD_BYTES).decode()
        check_json_values(line)
        return f" data.messages_key={messages_keys(json.loads(line))[0]}"
    return ""


# --- text


def _read_text(unit: Unit, *, check: bool) -> Iterator[Record]:
    offset, pending = unit.begin, b""
    with unit.open(unit.begin) as stream:
        while True:
            size = MOST_TEXT_BYTES - len(pending)
            if unit.end is not None:
                size = min(size, unit.end - offset - len(pending))
            content = pending + stream.read(size)
            if len(content) < MOST_TEXT_BYTES:
                break
            cut = content.rfind(b"\n") + 1 or _character_boundary(content)
            content, pending = content[:cut], content[cut:]
            if check:
                _check_text(unit, offset, content)
            yield Record(unit, offset, content)
            offset += cut
    if check:
        _check_text(unit, offset, content)
    if content:
        yield Record(unit, offset, content)


def _character_boundary(content: bytes) -> int:
    """The end of the last UTF-8 character that is surely complete."""
    ends = range(len(content) - 1, max(len(content) - 5, 0), -1)
    return next((i for i in ends if content[i] & 0xC0 != 0x80), len(content))


def _check_text(unit: Unit, offset: int, content: bytes) -> None:
    """Refuse binary files: all formats of compressed files have such a byte."""
    if (zero := content.find(b"\0")) >= 0:
        offset += zero
        raise not_text(unit, f"binary, with the byte 0x00 at offset {offset}")


def not_text(unit: Unit, got: str) -> DataFormatError:
    """The error for a file of another format."""
    fix = 'write its texts as lines {"text": …} to a file with the suffix .jsonl'
    if "0x00" in got:
        fix = "convert it to UTF-8 if it is UTF-16 or UTF-32; else " + fix
    elif got.endswith(".json"):
        fix += f": jq -c '.[]' {unit.path.name} > texts.jsonl"
    return DataFormatError(
        f"the data file {unit.name!r} is not text",
        got=f"{unit.path}: {got}",
        fix=f"{fix}\nor train on the raw bytes: data.format=text",
    )


# --- JSON lines


# The values of a record by key, or an UnusableRecordError.
_Parse: TypeAlias = Callable[[], Mapping[str, Any]]


def _read_lines(unit: Unit, config: DataConfig) -> Iterator[tuple[int, _Parse]]:
    """The offset and values of each line that is not blank."""
    del config  # a line is parsed whole
    offset = unit.begin
    with unit.open(unit.begin) as stream:
        while unit.end is None or offset < unit.end:
            line = stream.readline(_MOST_RECORD_BYTES + 1)
            size = len(line)
            if not size:
                return
            if size > _MOST_RECORD_BYTES and not line.endswith(b"\n"):
                yield offset, _refuse_length
                return
            if not offset:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                yield offset, partial(_values_in, line.removesuffix(b"\n"))
            offset += size


def _refuse_length() -> Mapping[str, Any]:
    most = f"{_MOST_RECORD_BYTES // 2**20} MiB"
    raise UnusableRecordError(f"it is longer than {most}")


def _values_in(line: bytes) -> Mapping[str, Any]:
    try:
        text = line.decode()
        check_json_values(text)
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise not_utf8(error) from error
    except json.JSONDecodeError as error:
        reason = f"it is not JSON: {error.msg} at character {error.pos + 1}"
        raise UnusableRecordError(reason) from error
    except RecursionError as error:
        reason = "it is not readable JSON: brackets are nested too deeply"
        raise UnusableRecordError(reason) from error
    except ValueError as error:  # a number of too many digits
        raise UnusableRecordError(str(error)) from error
    if not isinstance(record, dict):
        reason = f"it is {kind_of(record)}, not an object"
        raise UnusableRecordError(reason)
    return record


def _read_rows(unit: Unit, config: DataConfig) -> Iterator[tuple[int, _Parse]]:
    """The number and values of each row of a table."""
    keys = _keys(config)
    with unit.coded_errors():
        check_regular(unit.path)
        try:
            names = column_names(unit.path)
            if config.name in RECORDS:
                others = keys if config.name == "preferences" else names
                keys = tuple(name for name in names if name in others) or keys
            # Not read, as they may be images.
            unread = {name: name in UNUSED or None for name in names}
            for row, values in read_columns(unit.path, keys, unit.begin, unit.end):
                yield row, partial(_values_of_row, {**unread, **values})
        except KeyError as error:
            (names,) = error.args
            raise BadRecordError(
                f"the data file {unit.name!r} has no column {keys[0]!r}",
                got=f"{unit.path} has {', '.join(names)}",
                fix="name a column: data.text_key, data.messages_key, data.prompt_key; "
                + did_you_mean(keys[0], names[:12]),
            ) from error


def _values_of_row(values: Mapping[str, Any]) -> Mapping[str, Any]:
    for value in values.values():
        if isinstance(value, UnicodeDecodeError):
            raise not_utf8(value)
        if isinstance(value, str) and 4 * len(value) > _MOST_RECORD_BYTES:
            value = value.encode()  # its bytes count, of four at most a character
        if isinstance(value, bytes) and len(value) > _MOST_RECORD_BYTES:
            _refuse_length()
        if isinstance(value, Exception):
            raise UnusableRecordError(f"it cannot be read: {value}")
    return values


def bad_record(
    unit: Unit, offset: int, reason: str, config: DataConfig
) -> BadRecordError:
    """The error for a record that cannot be used."""
    position = _position(unit, offset).removeprefix(", ")
    what = "messages" if config.messages_key else "text"
    key, fix = _keys(config)[0], f"use another key: data.{what}_key=<name>"
    if config.name in RECORDS:
        what, fix = _OF_RECORDS[config.name]
    elif unit.format == JSON_LINES:
        fix = (
            f'write one JSON object a line, with its {what} under "{key}"\n'
            f"or {fix}\nor train on the raw lines: data.format=text"
        )
    return BadRecordError(
        f"{position} of the data file {unit.name!r} has no {what}",
        got=f"{unit.path}, {position}: {reason}",
        fix=fix,
    )


def bad_conversation(
    unit: Unit, offset: int, reason: str, config: DataConfig
) -> BadRecordError:
    """The error for messages that the chat template cannot write, or not for this."""
    position = _position(unit, offset).removeprefix(", ")
    unfound = (
        "if answers are not found, learn those after the last message of a user: "
        "data.loss_on=last_turn, or all that is written: data.loss_on=all\nor "
    )
    return BadRecordError(
        f"{position} of the data file {unit.name!r} is a conversation that the chat "
        "template cannot use",
        got=f"{unit.path}, {position}: {reason}",
        fix="correct the record, or leave it out\n"
        + ("" if config.name in RECORDS else unfound)
        + "mark answers by {% generation %} in the chat template of the model's folder",
    )
