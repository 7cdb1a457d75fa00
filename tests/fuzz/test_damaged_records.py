# SPDX-License-Identifier: Apache-2.0
"""JSON lines with damage: each line is read as Python's own json reads it, or named.

The same lines are read whole, in parts and compressed; by hand each line is decoded and
parsed by itself.
"""

import gzip
import json
import random
from contextlib import nullcontext
from pathlib import Path

import pytest

from tessera.errors import BadRecordError
from tessera.train.data import DataConfig
from tessera.train.data.file_ranges import Unit, divide, split
from tessera.train.data.records import read_records

Draw = random.Random
CHARACTERS = [
    "a",
    " ",
    "\n",
    "\r",
    "\t",
    '"',
    "\\",
    "{",
    "}",
    "é",
    "😀",
    "\u2028",
    "\0",
]


def text_of(draw: Draw) -> str:
    return "".join(draw.choices(CHARACTERS, k=draw.randint(0, 12)))


def value_of(draw: Draw) -> object:
    other = [None, 1, 1.5, True, [], ["a"], {}, {"text": "a"}, "\ud800"]
    return text_of(draw) if draw.random() < 0.8 else draw.choice(other)


def line_of(draw: Draw) -> bytes:
    """A line without its end: a record, or damage."""
    items = [("id", draw.randrange(99)), ("text", value_of(draw)), ("more", [{}])]
    draw.shuffle(items)
    record = dict(items[: draw.randint(1, 3)])
    ascii_only = draw.random() < 0.5 or "\ud800" in record.values()
    line = json.dumps(record, ensure_ascii=ascii_only).encode()
    damage = draw.random()
    if damage < 0.1:
        line = line[: draw.randrange(len(line))]
    elif damage < 0.2:
        at = draw.randrange(len(line))
        line = line[:at] + draw.randbytes(draw.randint(1, 3)) + line[at + 1 :]
    elif damage < 0.3:
        line = draw.choice(
            [b"", b" ", b"\r", b"null", b"[]", b"NaN", b"{}{}", b"[" * 9999]
        )
    return line.replace(b"\n", b" ")


def text_by_hand(line: bytes) -> str | None:
    """The text of a line as Python's json has it; None if it has none."""
    try:
        record = json.loads(line.decode())
        text = record["text"] if isinstance(record, dict) else None
        if not isinstance(text, str):
            return None
        text.encode()
    except (ValueError, KeyError, RecursionError):
        return None
    return text


@pytest.mark.fuzz(sample=50, whole=5000)
def test_a_damaged_file_gives_the_texts_that_json_reads(seed, tmp_path):
    draw = Draw(seed)
    lines = [line_of(draw) for _ in range(draw.randint(1, 40))]
    content = b"\n".join(lines) + draw.choice([b"", b"\n", b"\n\n"])
    path = Path(tmp_path, "a.jsonl")
    path.write_bytes(content)
    compressed = Path(tmp_path, "a.jsonl.gz")
    compressed.write_bytes(gzip.compress(content))
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    by_hand = [(n, text_by_hand(line)) for n, line in numbered]
    bad = [n for n, text in by_hand if text is None]
    first = min(bad, default=len(lines) + 1)
    good = [(f"line {n}", text) for n, text in by_hand if n < first]
    whole = Unit(path.name, path, "jsonl")
    cut = [side[0] for side in split([whole], draw.choice([0.1, 0.5, 0.9]))]
    for units in (
        [whole],
        [Unit(compressed.name, compressed, "jsonl")],
        divide(whole, draw.randint(1, 200)),
        [part for unit in cut for part in divide(unit, draw.randint(1, 200))],
    ):
        read = []
        expected = f", line {first}: " if bad else None
        with pytest.raises(BadRecordError, match=expected) if bad else nullcontext():
            for unit in units:
                for record in read_records(unit, DataConfig(), set()):
                    read.append((record.name.partition(", ")[2], record.text))
        assert read == good
