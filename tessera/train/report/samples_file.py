# SPDX-License-Identifier: Apache-2.0
"""Reads ``samples.jsonl``: completions that a run kept, with their rewards.

The file may have gigabytes: it is read twice, and a bounded number of completions, with
their texts cut, stays in memory. A line has

| field | value |
| --- | --- |
| step | the first one that learns from it |
| index | its number among those of the step; may be absent |
| prompt, completion | text, or messages: mappings with role and content |
| reward, advantage, tokens | numbers; null or absent where missing |
| rewards | by function; null where missing |
| ended | false where it was cut at the most tokens |
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tessera.train.files.regular_files import check_regular
from tessera.train.files.untrusted_json import count_of

_Item = TypeVar("_Item")

_MOST_SAMPLES: Final = 500
_LONGEST_LINE: Final = 2**20
_LONGEST_TEXT: Final = 4000


@dataclass(frozen=True)
class Sample:
    """A completion; of its numbers, None is a missing one.

    Attributes:
      step: The first one that learns from it.
      index: Its number among those of the step, or 0.
      prompt: As text, cut in its middle where it is long.
      completion: As the prompt.
      reward: The total.
      numbers: Rewards by function, the advantage, the length in tokens.
      is_cut: Whether it was cut at the most tokens.
    """

    step: int
    index: int
    prompt: str
    completion: str
    reward: float | None
    numbers: Sequence[tuple[str, float | None]]
    is_cut: bool


@dataclass(frozen=True)
class Samples:
    """What the file holds.

    Attributes:
      chosen: Some of the completions, spread over the steps.
      total: How many there are of steps that counted.
      repeated: Those of steps that a later attempt repeated.
    """

    chosen: Sequence[Sample] = ()
    total: int = 0
    repeated: int = 0


def read_samples(path: Path, problems: list[str]) -> Samples:
    """Read the file, without what a later attempt wrote again.

    An attempt that goes on from a checkpoint writes a step that is there already, or an
    earlier one: what the file has from this step on is of steps that did not count.

    Args:
      path: ``samples.jsonl``; one that does not exist holds nothing.
      problems: Gets how many lines could not be read.

    Raises:
      OSError: It is no regular file, or cannot be read.
    """
    if not path.exists():
        return Samples()
    check_regular(path)
    places: list[tuple[int, int]] = []  # steps and offsets
    offset = repeated = bad = 0
    last = (0, 0)
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if sample := _sample(line):
                at = sample.step, sample.index
                if at < last:
                    kept = [place for place in places if place[0] < sample.step]
                    repeated, places = repeated + len(places) - len(kept), kept
                places.append((sample.step, offset))
                last = at
            bad += sample is None
            offset += len(line)
        chosen = list[Sample]()
        for _, offset in evenly(places, _MOST_SAMPLES):
            file.seek(offset)
            if sample := _sample(file.readline(_LONGEST_LINE)):
                chosen.append(sample)
    if bad:
        problems.append(f"{path.name}: {bad} lines that are cut or no completions")
    return Samples(chosen, len(places), repeated)


def evenly(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    """Some of the items, at even distances.

    Args:
      items: What to choose from.
      most: How many to take at most; of two and more, the first and the last are some.

    Example:
      >>> evenly("abcdefg", 3)
      ['a', 'd', 'g']
    """
    if len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // max(most - 1, 1)] for i in range(most)]


def _sample(line: bytes) -> Sample | None:
    """The completion of a line; None of one that is cut or not as expected."""
    try:
        values = json.loads(line)
        others = ((name, values.get(name)) for name in ("advantage", "tokens"))
        numbers = (*(values.get("rewards") or {}).items(), *others)
        return Sample(
            step=count_of(values["step"]),
            index=count_of(values.get("index", 0)),
            prompt=_text(values["prompt"]),
            completion=_text(values["completion"]),
            reward=_number(values.get("reward")),
            numbers=[(name, _number(value)) for name, value in numbers],
            is_cut=values.get("ended") is False,
        )
    except Exception:  # also of numbers of hundreds of digits
        return None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str:
    """A text, or messages in the order in which they were said."""
    if not isinstance(value, str):
        value = "\n".join(_message(**message) for message in value)
    if len(value) <= _LONGEST_TEXT:
        return value
    head, tail = value[: _LONGEST_TEXT // 2], value[-_LONGEST_TEXT // 2 :]
    return f"{head}\n[… {len(value) - _LONGEST_TEXT:,} characters …]\n{tail}"


def _message(role: str, content: Any = "", **others: Any) -> str:
    """A message; what is not text, as calls of tools, is written as JSON."""
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    return f"{role}: {content}" + (f" {json.dumps(others)}" if others else "")
