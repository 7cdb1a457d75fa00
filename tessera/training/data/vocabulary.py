# SPDX-License-Identifier: Apache-2.0
"""Whether a model has a row for every token of a text."""

import numpy as np

from tessera.errors import TokenRangeError, VocabularyError
from tessera.training.data.tokenization import Ids, Tokenizer


def check_tokens(
    name: str, content: str | bytes, ids: Ids, tokenizer: Tokenizer, vocab_size: int
) -> None:
    """See that a model has a row for every token of a text.

    Args:
      name: What the text is called.
      content: The text.
      ids: Its token ids.
      tokenizer: Which gave them.
      vocab_size: Rows of the model's table.

    Raises:
      TokenRangeError: [T604] it has not; names the first such token and its place.
    """
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if not wrong.size:
        return
    token, place = tokenizer.token_at(content, int(wrong[0]))
    text = content if isinstance(content, str) else content.decode(errors="replace")
    line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
    raise TokenRangeError(
        f"the text of {name!r} has a token that the model does not have",
        got=f"{token!r}, id {ids[wrong[0]]}, at line {line}, character {column}; "
        f"{wrong.size} such in all; the model has the ids 0 to {vocab_size - 1}",
        fix="take it out of the text, or use the tokenizer that belongs to the model; "
        "a model that is trained from the beginning may have a larger "
        "model.vocab_size",
    )


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
