# SPDX-License-Identifier: Apache-2.0
"""The position of a run in its data, as checkpoints store it.

A cursor counts rows, not batches: a run that resumes with another batch size, such as
on more devices, continues with the row after the last one it was trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tessera.errors import DataChangedError
from tessera.train.data.corpus import Corpus
from tessera.train.files.untrusted_json import Count

# Names of the parts of an order in messages about changes.
_NAMES: Final = {
    "text": "the text that is trained on",
    "tokenizer": "data.tokenizer",
    "sequence_length": "training.sequence_length",
    "rows": "the number of rows",
    "seed": "training.seed",
    "shuffle": "the order that grain gives the rows",
}


@dataclass(frozen=True)
class Cursor:
    """A position in the order in which training reads rows.

    Attributes:
      rows: Rows read so far, over all passes.
      order: What determines the order; see ``Corpus.order``.
    """

    rows: Count
    order: Mapping[str, str | int]

    @classmethod
    def start(cls, corpus: Corpus) -> "Cursor":
        """The cursor before the first row."""
        return cls(0, corpus.order)

    def advance(self, rows: int) -> "Cursor":
        """The cursor ``rows`` rows later."""
        return replace(self, rows=self.rows + rows)

    def resumed(self, corpus: Corpus, resume_data: str = "exact") -> "Cursor":
        """The cursor at which a resumed run continues.

        Args:
          corpus: The data of the resumed run.
          resume_data: ``exact`` requires the same order; ``restart`` starts at the
            first row of the corpus.

        Raises:
          DataChangedError: [T803] the order differs; names every difference.
        """
        if resume_data == "restart":
            return Cursor.start(corpus)
        differences = [
            f"{name}: {self.order.get(key)} -> {corpus.order[key]}"
            for key, name in _NAMES.items()
            if self.order.get(key) != corpus.order[key]
        ]
        if differences:
            raise DataChangedError(
                f"the run cannot continue at row {self.rows:,}: its data has changed",
                got="\n".join(differences),
                fix="use the data, seed and sequence length of the checkpoint, or "
                "start at the first row of this data: training.resume_data=restart",
            )
        return self
