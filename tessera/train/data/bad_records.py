# SPDX-License-Identifier: Apache-2.0
"""Counts the records of the data that cannot be used, up to a limit."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tessera.errors import BadRecordError, TesseraError

_MOST_EXAMPLES: Final = 5


@dataclass
class BadRecords:
    """The records that were skipped, and what was not used of the others.

    Plain values, so that it can be stored as JSON.

    Attributes:
      limit: ``data.max_bad_records``.
      counts: How many there are of each kind, such as ``invalid JSON``.
      examples: What is wrong with the first of them, and where.
      ignored: Keys of records that change what others would train on.

    Example:
      >>> bad = BadRecords(limit=2)
      >>> bad.skip("null", BadRecordError("no text", got="a.jsonl, line 3: it is null"))
      >>> print(bad)
      1 bad record skipped: 1 null
      a.jsonl, line 3: it is null
    """

    limit: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def ignore(self, keys: Iterable[str]) -> None:
        """Note keys that are not used, each once."""
        self.ignored = sorted({*self.ignored, *keys})

    def skip(self, kind: str, error: TesseraError) -> None:
        """Count a record.

        Raises:
          TesseraError: ``error`` itself if the limit is 0.
          BadRecordError: [T607] there are more than the limit.
        """
        if not self.limit:
            raise error
        self.add(BadRecords(self.limit, {kind: 1}, [error.got]))

    def add(self, others: "BadRecords") -> None:
        """Add the counts of another reader.

        Raises:
          BadRecordError: [T607] there are more than the limit in all.
        """
        self.counts = dict(Counter(self.counts) + Counter(others.counts))
        self.examples = (self.examples + others.examples)[:_MOST_EXAMPLES]
        self.ignore(others.ignored)
        if sum(self.counts.values()) > self.limit:
            raise BadRecordError(
                "the data has more bad records than data.max_bad_records allows",
                got=f"data.max_bad_records={self.limit}\n{self}",
                fix="repair these records, or raise data.max_bad_records",
            )

    def __str__(self) -> str:
        total = sum(self.counts.values())
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(self.counts.items()))
        records = "record" if total == 1 else "records"
        heading = f"{total:,} bad {records} skipped: {kinds}"
        return "\n".join([heading, *self.examples])
