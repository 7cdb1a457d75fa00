# SPDX-License-Identifier: Apache-2.0
"""Checked rewards, which runs name without a module: ``rewards=[exact,length(…)]``.

Each public function here takes the settings that are in the parentheses, and returns
the reward function. A completion that is a list of messages counts by the text of its
last one. Where a record has no answer, its completions are not judged.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from importlib import import_module
from numbers import Number
from typing import Any, Final, TypeAlias

from tessera.errors import RewardError
from tessera.train.data.optional_libraries import import_extra

Text: TypeAlias = str | Sequence[Mapping[str, Any]]
Function: TypeAlias = Callable[[Sequence[Any]], list[float | None]]

NAMES: Final = ("exact", "json_schema", "length", "math", "regex")
# In linear time, also of digits without end.
_NUMBER: Final = re.compile(
    r"[-+]?(?=\.?\d)(\d{1,3}(,\d{3})+|\d*)(\.\d*)?([eE][-+]?\d{1,9})?", re.ASCII
)
_DELIMITED: Final = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")


def exact(*, column: str = "answer") -> Function:
    """1 where the completion is the answer of the record, else 0.

    Both are compared without white space around them. Of what has ``####``, as the
    answers of GSM8K, counts the line that follows the last. Where both are numbers,
    their values are compared: ``1,000`` is ``1000.0``.

    Args:
      column: The column of the answers, texts or numbers.
    """

    def equal(text: str, answer: str) -> float:
        pair = _final(text), answer
        if all(map(_NUMBER.fullmatch, pair)):
            return float(len({Decimal(each.replace(",", "")) for each in pair}) == 1)
        return float(len(set(pair)) == 1)

    return _compared(column, equal)


def math(*, column: str = "answer") -> Function:
    r"""1 where the completion's result equals the answer, by ``math-verify``; else 0.

    Args:
      column: The column of the answers: numbers, expressions or LaTeX. What has no
        ``$`` or ``\boxed`` is an expression as a whole: of ``2\sqrt{3}``, math-verify
        alone would read the 2. One that it cannot read is not judged.
    """
    library = import_extra("math_verify", "math", "rewards", RewardError)

    def equal(text: str, answer: str) -> float | None:
        gold = library.parse(answer if _DELIMITED.search(answer) else f"${answer}$")
        return float(library.verify(gold, library.parse(text))) if gold else None

    return _compared(column, equal)


def regex(*, pattern: str) -> Function:
    r"""1 where ``re.search`` finds the pattern in the completion, else 0.

    Args:
      pattern: Of Python: begin it with ``(?s)`` where ``.`` may be a line break.
    """
    search = re.compile(pattern).search
    return lambda completions: [float(bool(search(_text(c)))) for c in completions]


def json_schema(*, schema: Any = None, column: str | None = None) -> Function:
    """1 where the completion is JSON that its schema allows, else 0.

    Args:
      schema: Of all completions, as a dict or as JSON.
      column: The column with the schema of each record, in place of ``schema``.

    References of a schema to other files are not followed.
    """
    library = import_extra("jsonschema", "json_schema", "rewards", RewardError)
    registry = import_module("referencing").Registry()

    def valid(text: str, schema: Any) -> float:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        kind = library.validators.validator_for(schema, library.Draft202012Validator)
        kind.check_schema(schema)
        try:
            value = json.loads(text, parse_constant=int)  # NaN is an error
        except (ValueError, RecursionError):
            return 0.0
        return float(kind(schema, registry=registry).is_valid(value))

    if (schema is None) == (column is None):
        raise ValueError("it needs schema={...} or column='…', one of them")
    if column is not None:
        return _compared(column, valid, lambda cell: cell)
    valid("", schema)
    return lambda completions: [valid(_text(c), schema) for c in completions]


def length(
    *, maximum: int, cache: int = 0, minimum: int = 0, unit: str = "tokens"
) -> Function:
    """0 for lengths that are allowed, down to -1 for longer ones; -1 for shorter ones.

    Equation 13 of DAPO (arXiv 2503.14476), its soft overlong punishment: 0 up to
    ``maximum - cache``, from there linear to -1 at ``maximum``.

    Args:
      maximum: The greatest length, L_max of the paper.
      cache: How far below it the punishment begins, L_cache of the paper.
      minimum: Shorter completions get -1.
      unit: ``tokens``, which counts the column ``completion_ids``, or ``characters``.
    """
    free = maximum - cache
    if not 0 <= minimum <= free <= maximum or unit not in ("tokens", "characters"):
        raise ValueError(
            "0 <= minimum <= maximum - cache <= maximum, unit='tokens' or 'characters'"
        )

    def value(size: int) -> float:
        if minimum <= size <= maximum:
            return min(0.0, (free - size) / max(cache, 1))
        return -1.0

    if unit == "tokens":
        return lambda completion_ids: [value(len(ids)) for ids in completion_ids]
    return lambda completions: [value(len(_text(c))) for c in completions]


def _answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | Number):
        raise TypeError(f"an answer is a text or a number, not {type(value).__name__}")
    return _final(str(value))


def _compared(
    column: str,
    compare: Callable[[str, Any], float | None],
    read: Callable[[Any], Any] = _answer,
) -> Function:
    """The function that compares completions with what a column has for them."""

    def score(completions: Sequence[Text], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for text, cell in zip(completions, columns[column], strict=True):
            # Tables have NaN where there is nothing.
            answer = None if cell is None or cell != cell else read(cell)
            is_judged = answer is not None and answer != ""
            rewards.append(compare(_text(text), answer) if is_judged else None)
        return rewards

    return score


def _text(completion: Text) -> str:
    """A completion's text; of messages, that of the last one."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    return content or ""


def _final(text: str) -> str:
    """What follows the last ``####`` in its line; all of a text without it."""
    _, mark, after = text.rpartition("####")
    return after.strip().partition("\n")[0].strip() if mark else after.strip()
