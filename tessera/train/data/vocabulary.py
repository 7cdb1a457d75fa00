# SPDX-License-Identifier: Apache-2.0
"""Checks that a model's vocabulary has the ids of a tokenizer and of its texts."""

import numpy as np
import numpy.typing as npt

from tessera.errors import TokenRangeError, VocabularyError
from tessera.train.data.tokenization import Ids, Tokenizer


def check_tokens(
    name: str,
    content: str | bytes,
    ids: Ids,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    first_line: int = 1,
) -> None:
    """Check that the model's vocabulary has every token of a text.

    Args:
      name: Name of the text.
      content: The text.
      ids: Its token ids.
      tokenizer: The tokenizer that returned them.
      vocab_size: The model's vocabulary size.
      first_line: The number of the text's first line.

    Raises:
      TokenRangeError: [T604] it has not; names the first such token and its position.
    """
    wrong = out_of_vocabulary(ids, vocab_size)
    if not wrong.size:
        return
    first = int(ids[wrong[0]])
    text = content if isinstance(content, str) else content.decode(errors="replace")
    lines = (
        f", at line {number}"
        for number, line in enumerate(text.split("\n"), first_line)
        if out_of_vocabulary(tokenizer.encode(line), vocab_size).size
    )
    # A token may span two lines.
    position = f"token {wrong[0] + 1} of {ids.size}{next(lines, '')}"
    raise TokenRangeError(
        f"the text of {name!r} has a token that the model does not have",
        got=f"{tokenizer.token(first)!r}, id {first}, is {position}; {wrong.size} such "
        f"in all; the model has ids 0 to {vocab_size - 1}",
        fix="remove it from the text, or use the model's own tokenizer; a model that "
        "is trained from scratch can have a larger model.vocab_size",
    )


def out_of_vocabulary(ids: Ids, vocab_size: int) -> npt.NDArray[np.intp]:
    """Positions of the ids that are outside of a model's vocabulary."""
    return np.flatnonzero((ids < 0) | (ids >= vocab_size))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that the model's vocabulary has every id of a tokenizer.

    Raises:
      VocabularyError: [T603] it has not.
    """
    if tokenizer.vocab_size > vocab_size:
        raise _too_many_ids(tokenizer, vocab_size, "")


def check_separator(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that the model's vocabulary has a tokenizer's separator.

    Other ids may be larger, as the image tokens of published models are: only those in
    the text are checked.

    Raises:
      VocabularyError: [T603] it has not.
    """
    separator = tokenizer.separator
    if separator is not None and separator >= vocab_size:
        note = f", and id {separator} precedes every document"
        raise _too_many_ids(tokenizer, vocab_size, note)


def _too_many_ids(tokenizer: Tokenizer, vocab_size: int, note: str) -> VocabularyError:
    return VocabularyError(
        "the tokenizer's vocabulary is larger than the model's",
        got=f"{tokenizer.kind} tokenizer: {tokenizer.vocab_size} ids, "
        f"model: {vocab_size}{note}",
        fix=f"use a model.vocab_size of at least {tokenizer.vocab_size}, or a "
        "tokenizer with fewer ids",
    )
