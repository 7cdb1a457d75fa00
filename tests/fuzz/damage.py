# SPDX-License-Identifier: Apache-2.0
"""Damages the content of files: bits and bytes, and values of JSON."""

import json
import random
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError

Draw = random.Random
Damage = Callable[[Draw, bytes], bytes]
_DEEP = json.loads("[" * 200 + "]" * 200)
ODD: list[Any] = [
    *(None, True, 0, -1, 10**400, 2**31, 2**32, 2**63, 1.5, -0.0, 1e308),
    *("", "\x1b[2J", "\ud800", "\0", "a" * 10_000, "../../etc/passwd", "${x}"),
    *([], {}, [[]], [None], {"": {}}, [1, "a"], {"a": 1}, _DEEP),
]


@contextmanager
def bounded() -> Iterator[None]:
    """What happens within ten CPU seconds and 500 MB, and raises coded errors alone."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    shown = ""
    try:
        yield
    except TesseraError as error:
        shown = str(error)
    assert "\x1b" not in shown
    assert time.process_time() - start < 10
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 500 * 1024


def damage_one(draw: Draw, folder: Path, names: Mapping[str, Damage]) -> None:
    """Damage one or two of the files."""
    for name in draw.sample([*names], draw.randint(1, min(2, len(names)))):
        path = folder / name
        path.write_bytes(names[name](draw, path.read_bytes()))


def damaged_bytes(draw: Draw, content: bytes) -> bytes:
    """Content with one to three places of damage."""
    for _ in range(draw.randint(1, 3)):
        size = len(content)
        begin = draw.randrange(size + 1)
        end = min(size, begin + draw.choice([1, 1, 4, 100]))
        piece = content[begin:end]
        kind = draw.randrange(7)
        if kind == 0:
            return content[:begin]
        if kind == 1:
            piece = draw.randbytes(len(piece))
        elif kind == 2:
            piece = b""
        elif kind == 3:
            piece *= 3
        elif kind == 4:
            piece += b"\x1b[2J\xff\x00"
        elif kind == 5:
            piece = bytes(byte ^ 1 << draw.randrange(8) for byte in piece)
        elif numbers := [*re.finditer(rb"\d+", content)]:
            begin, end = draw.choice(numbers).span()
            piece = draw.choice([b"9" * 400, b"-1", b"1e999", b"4294967295", b"9" * 19])
        content = content[:begin] + piece + content[end:]
    return content


def damaged_json(draw: Draw, content: bytes) -> bytes:
    """A JSON document with one to three other values, or with bytes damaged."""
    if draw.random() < 0.3:
        return damaged_bytes(draw, content)
    values = json.loads(content)
    for _ in range(draw.randint(1, 3)):
        holder, key = draw.choice([*_places(values)])
        if draw.random() < 0.2:
            del holder[key]
        elif draw.random() < 0.2 and isinstance(holder, dict):
            holder[draw.choice(["", "\x1b[2J", "a", str(2**40)])] = _copy(holder[key])
        else:
            holder[key] = _copy(draw.choice(ODD))
        if not values:
            break
    return json.dumps(values).encode()


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a document with each of its keys; at most 10 levels."""
    pending = [(values, 0)]
    while pending:
        holder, depth = pending.pop()
        keys = [*holder] if isinstance(holder, dict) else [*range(len(holder))]
        for key in keys:
            yield holder, key
            if isinstance(holder[key], (dict, list)) and depth < 10:
                pending.append((holder[key], depth + 1))
