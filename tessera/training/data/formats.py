# SPDX-License-Identifier: Apache-2.0
"""Reads the texts of a data file: plain text, or JSON lines with a text in each.

The format depends on the suffix, unless ``data.format`` sets it. Other formats are
refused: their bytes would be trained on as if they were text.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from tessera.errors import DataFormatError, JsonLinesError, did_you_mean
from tessera.training.data.documents import Document

TEXT: Final = "text"
JSON_LINES: Final = "jsonl"

_JSON_LINES_SUFFIXES: Final = (".jsonl", ".ndjson")
_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys((".json",), "JSON"),
        **dict.fromkeys((".csv", ".tsv", ".xlsx", ".xls", ".ods"), "a table"),
        **dict.fromkeys((".parquet", ".arrow", ".feather", ".orc", ".avro"), "a table"),
        **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb"), "a database"),
        **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "an archive"),
        **dict.fromkeys((".bz2", ".xz", ".zst", ".lz4"), "compressed"),
        **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".h5", ".hdf5"), "arrays"),
        **dict.fromkeys((".safetensors", ".bin", ".tfrecord", ".mds"), "arrays"),
        **dict.fromkeys((".pkl", ".pickle", ".joblib"), "a pickle"),
        **dict.fromkeys((".pdf", ".docx", ".doc", ".odt", ".epub"), "a document"),
    }
)
_FIRST_BYTES: Final[Mapping[bytes, str]] = MappingProxyType(
    {
        b"\x1f\x8b": "gzip, in a file that does not end in .gz",
        b"PK\x03\x04": "a zip archive",
        b"PAR1": "Parquet",
        b"\x28\xb5\x2f\xfd": "zstd",
        b"BZh": "bzip2",
        b"\xfd7zXZ": "xz",
        b"%PDF-": "a PDF",
    }
)


def format_of(document: Document, setting: str) -> str:
    """The format of a file: ``text`` or ``jsonl``.

    Args:
      document: The file; only its name is used.
      setting: ``data.format``; ``auto`` depends on the suffix before ``.gz``.

    Raises:
      DataFormatError: [T606] the suffix is that of another format.
    """
    if setting != "auto":
        return setting
    suffix = PurePath(document.name.lower().removesuffix(".gz")).suffix
    if suffix in _REFUSED:
        raise _refused(document, f"{_REFUSED[suffix]}, by its suffix {suffix}")
    return JSON_LINES if suffix in _JSON_LINES_SUFFIXES else TEXT


def texts_of(
    document: Document, setting: str, field: str
) -> Iterator[tuple[str, bytes]]:
    """The name and bytes of each text of a file.

    Args:
      document: The file, or a part of it.
      setting: ``data.format``.
      field: ``data.text_field``.

    Raises:
      DataNotFoundError: [T601] the file cannot be read.
      DataFormatError: [T606] it is not text.
      JsonLinesError: [T607] a line is not a JSON object with a text in that field.
    """
    content = document.read()
    if format_of(document, setting) == JSON_LINES:
        yield from _json_lines(document, content, field)
        return
    if setting == "auto":
        _check_text(document, content)
    yield document.name, content


def _check_text(document: Document, content: bytes) -> None:
    for begin, kind in _FIRST_BYTES.items():
        if not document.begin and content.startswith(begin):
            raise _refused(document, f"{kind}, by its first bytes")
    if (offset := content.find(b"\0")) >= 0:
        offset += document.begin
        raise _refused(document, f"binary, with the byte 0x00 at offset {offset}")


def _refused(document: Document, got: str) -> DataFormatError:
    fix = 'write its texts as lines {"text": …} to a file with the suffix .jsonl'
    if "0x00" in got:
        fix = "convert it to UTF-8 if it is UTF-16 or UTF-32; else " + fix
    elif got.startswith("JSON"):
        fix += f": jq -c '.[]' {document.path.name} > texts.jsonl"
    return DataFormatError(
        f"the data file {document.name!r} is not text",
        got=f"{document.path}: {got}",
        fix=f"{fix}\nor train on the raw bytes: data.format=text",
    )


def _json_lines(
    document: Document, content: bytes, field: str
) -> Iterator[tuple[str, bytes]]:
    # Not splitlines: it also splits at characters that JSON strings may contain.
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, document.first_line):
        if line.strip():
            try:
                text = _text_of(json.loads(line), field)
                yield f"{document.name}:{number}", text.encode()
            except (ValueError, RecursionError) as error:
                raise _no_text(document, number, _reason(error), field) from error


def _text_of(value: Any, field: str) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"it is {_kind(value)}, not an object")
    if field not in value:
        near = did_you_mean(field, [str(name)[:40] for name in list(value)[:12]])
        raise ValueError(f"it has no field {field!r}; {near}")
    if not isinstance(value[field], str):
        raise ValueError(f"its field {field!r} is {_kind(value[field])}, not text")
    return value[field]


def _kind(value: Any) -> str:
    kinds = {list: "an array", dict: "an object", bool: "true or false", str: "text"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: byte 0x{error.object[error.start]:02x}"
    if isinstance(error, UnicodeEncodeError):
        return "its text has half of a surrogate pair, which is not a character"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, RecursionError):
        return "it is not readable JSON: brackets are nested too deeply"
    return str(error)


def _no_text(
    document: Document, number: int, reason: str, field: str
) -> JsonLinesError:
    return JsonLinesError(
        f"line {number} of the data file {document.name!r} has no text",
        got=f"{document.path}, line {number}: {reason}",
        fix=f'write one JSON object a line, with its text in the field "{field}"\n'
        "or use another field: data.text_field=<name>\n"
        "or train on the raw lines: data.format=text",
    )
