# SPDX-License-Identifier: Apache-2.0
"""How far a run has read its data, in a form that a checkpoint keeps.

A cursor counts rows, not batches: a run that goes on with batches of another size, on
more devices say, begins with the row after the last one that was learnt from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tessera.errors import DataChangedError
from tessera.training.data.corpus import Corpus

# What each part of an order is called where it is not what it was.
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
    """A place in the order in which training reads its rows.

    Attributes:
      rows: Rows read so far, of as many passes as that takes.
      order: What decides the order; see ``Corpus.order``.
    """

    rows: int
    order: Mapping[str, str | int]

    @classmethod
    def beginning(cls, corpus: Corpus) -> "Cursor":
        """Where nothing is read yet."""
        return cls(0, corpus.order)

    def moved(self, rows: int) -> "Cursor":
        """The cursor after so many more rows."""
        return replace(self, rows=self.rows + rows)

    def resumed(self, corpus: Corpus, resume_data: str = "exact") -> "Cursor":
        """Where to go on in a corpus.

        Args:
          corpus: What there is to read now.
          resume_data: ``exact`` asks for the same order; ``restart`` begins the order
            that there is now at its first row, whatever it is.

        Raises:
          DataChangedError: [T803] it is another order; names everything that differs.
        """
        if resume_data == "restart":
            return Cursor.beginning(corpus)
        differences = [
            f"{name}: {self.order.get(key)} -> {corpus.order[key]}"
            for key, name in _NAMES.items()
            if self.order.get(key) != corpus.order[key]
        ]
        if differences:
            raise DataChangedError(
                f"the run cannot go on at row {self.rows:,}: its data has changed",
                got="\n".join(differences),
                fix="use the data, seed and sequence length of the checkpoint, or "
                "begin this data at its first row: training.resume_data=restart",
            )
        return self
