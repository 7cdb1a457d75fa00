# SPDX-License-Identifier: Apache-2.0
"""Whether a model has a row for every token of a text."""

import numpy as np
import numpy.typing as npt

from tessera.errors import TokenRangeError, VocabularyError
from tessera.training.data.tokenization import Ids, Tokenizer


def check_tokens(
    name: str,
    content: str | bytes,
    ids: Ids,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    first_line: int = 1,
) -> None:
    """See that a model has a row for every token of a text.

    Args:
      name: What the text is called.
      content: The text.
      ids: Its token ids.
      tokenizer: Which gave them.
      vocab_size: Rows of the model's table.
      first_line: The number of the text's first line.

    Raises:
      TokenRangeError: [T604] it has not; names the first such token and its place.
    """
    wrong = _beyond(ids, vocab_size)
    if not wrong.size:
        return
    first = int(ids[wrong[0]])
    text = content if isinstance(content, str) else content.decode(errors="replace")
    lines = (
        f", at line {number}"
        for number, line in enumerate(text.split("\n"), first_line)
        if _beyond(tokenizer.encode(line), vocab_size).size
    )
    # A token may be of two lines together.
    place = f"token {wrong[0] + 1} of {ids.size}{next(lines, '')}"
    raise TokenRangeError(
        f"the text of {name!r} has a token that the model does not have",
        got=f"{tokenizer.token(first)!r}, id {first}, is {place}; {wrong.size} such in "
        f"all; the model has the ids 0 to {vocab_size - 1}",
        fix="take it out of the text, or use the tokenizer that belongs to the model; "
        "a model that is trained from the beginning may have a larger "
        "model.vocab_size",
    )


def _beyond(ids: Ids, vocab_size: int) -> npt.NDArray[np.intp]:
    """Where ids lie outside of a model's."""
    return np.flatnonzero((ids < 0) | (ids >= vocab_size))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer all of whose ids are in the text."""
    if tokenizer.vocab_size > vocab_size:
        raise _too_many_ids(tokenizer, vocab_size, "")


def check_separator(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer whose separator the model does not have.

    Other ids may lie beyond the model's, as those of image tokens of published models
    do: it is the text that must not have them.
    """
    separator = tokenizer.separator
    if separator is not None and separator >= vocab_size:
        said = f", and id {separator} stands before every document"
        raise _too_many_ids(tokenizer, vocab_size, said)


def _too_many_ids(tokenizer: Tokenizer, vocab_size: int, said: str) -> VocabularyError:
    return VocabularyError(
        "the tokenizer's vocabulary is larger than the model's",
        got=f"{tokenizer.kind} tokenizer: {tokenizer.vocab_size} ids, "
        f"model: {vocab_size}{said}",
        fix=f"give the model a vocabulary of at least {tokenizer.vocab_size}, or "
        "use a tokenizer with fewer ids",
    )
