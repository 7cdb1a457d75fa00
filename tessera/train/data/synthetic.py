# SPDX-License-Identifier: Apache-2.0
"""Generates learnable tokens from a seed, without files, for any vocabulary.

A document is a sequence of random choices among 64 fixed patterns of 32 tokens; then a
fraction ``noise`` of the tokens is replaced by random ones. Within a pattern the next
token is certain, so a model that has learnt the patterns has a loss of about

    log(64) / 32 + noise * log(vocab_size) + H(noise)    nats a token

where H is the binary entropy; an untrained model has a loss of log(vocab_size).
"""

import hashlib
import os
from collections.abc import Iterable
from functools import partial

import numpy as np
import numpy.typing as npt

from tessera.errors import SettingValueError, TokenizerError
from tessera.train.data.data_config import SyntheticConfig
from tessera.train.data.tokenization import Ids, Tokenizer

NUM_PATTERNS = 64
PATTERN_LENGTH = 32
MAX_PATTERNS_PER_DOCUMENT = 16

# Peak memory, measured with 20 and 40 million tokens from numbers to packed rows.
_BYTES_PER_TOKEN = 20


class SyntheticTokenizer(Tokenizer):
    """Ids written as decimal numbers; 0 separates documents.

    Example:
      >>> SyntheticTokenizer(100).encode("7 42")
      array([ 7, 42], dtype=int32)
      >>> SyntheticTokenizer(100).decode([0, 7, 42])
      '7 42'
    """

    kind = "synthetic"
    separator: int | None = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str | bytes) -> Ids:
        """The numbers in ``text``, separated by spaces."""
        content = text if isinstance(text, str) else text.decode()
        try:
            return np.array([int(word) for word in content.split()], np.int32)
        except ValueError as error:
            raise TokenizerError(
                "the text of synthetic data consists of numbers",
                got=repr(content),
                fix="write ids separated by spaces: '7 42'",
            ) from error

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """The ids as numbers, without separators."""
        return " ".join(str(i) for i in ids if i != 0)

    def token(self, number: int) -> str:
        """The number."""
        return str(number)


def make_documents(
    config: SyntheticConfig, vocab_size: int, seed: int
) -> list[npt.NDArray[np.int32]]:
    """Documents with ``config.tokens`` tokens in all, determined by the arguments.

    Returns:
      Their ids, int32 [tokens], each id in [1, vocab_size).

    Raises:
      SettingValueError: [T502] this machine has not enough memory for them.

    Example:
      >>> ids, *_ = make_documents(SyntheticConfig(tokens=99), 50, seed=0)
      >>> ids.dtype, bool((ids > 0).all() and (ids < 50).all())
      (dtype('int32'), True)
    """
    _check_memory(config.tokens)
    draw = partial(_integers, seed)
    shape = NUM_PATTERNS, PATTERN_LENGTH
    patterns = draw("patterns", shape[0] * shape[1], vocab_size - 1) + 1
    num_pieces = -(-config.tokens // PATTERN_LENGTH)
    pieces = draw("pieces", num_pieces, NUM_PATTERNS)
    ids = patterns.reshape(shape)[pieces].reshape(-1)
    # Compared in 2**32 parts, so that noise 0 changes nothing and 1 everything.
    noisy = draw("where", ids.size, 2**32) < config.noise * 2**32
    ids[noisy] = draw("noise", ids.size, vocab_size - 1)[noisy] + 1
    lengths = draw("lengths", num_pieces, MAX_PATTERNS_PER_DOCUMENT) + 1
    ends = np.cumsum(lengths) * PATTERN_LENGTH
    tokens = ids[: config.tokens].astype(np.int32)
    return np.split(tokens, ends[ends < config.tokens])


def _check_memory(tokens: int) -> None:
    needed = tokens * _BYTES_PER_TOKEN
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise SettingValueError(
            "this machine has not enough memory for so many synthetic tokens",
            got=f"data.synthetic.tokens={tokens} take {needed:,} bytes while "
            f"generated, {_BYTES_PER_TOKEN} each, of {available:,}",
            fix=f"use data.synthetic.tokens={available // _BYTES_PER_TOKEN} at most",
        )


def _integers(seed: int, use: str, count: int, below: int) -> npt.NDArray[np.int64]:
    """``count`` integers in [0, below), from a separate stream for each ``use``.

    NumPy keeps the bits of Philox the same in all releases, but not what its other
    functions make of them.
    """
    key = hashlib.blake2b(f"{use}/{seed}".encode(), digest_size=16).digest()
    numbers = np.random.Philox(key=int.from_bytes(key, "big")).random_raw(count)
    numbers %= np.uint64(below)
    return numbers.view(np.int64)
