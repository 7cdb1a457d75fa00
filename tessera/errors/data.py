# SPDX-License-Identifier: Apache-2.0
"""Errors T6xx: data."""

from tessera.errors.base import TesseraError


class DataNotFoundError(TesseraError, ValueError):
    """A data path does not exist or cannot be read."""

    code = "T601"


class EmptyDataError(TesseraError, ValueError):
    """There is no text in the data, or not enough for one batch."""

    code = "T602"


class VocabularyError(TesseraError, ValueError):
    """The tokenizer's vocabulary is larger than the model's."""

    code = "T603"


class TokenRangeError(TesseraError, ValueError):
    """A token id lies outside the model's vocabulary."""

    code = "T604"


class TokenizerError(TesseraError, ValueError):
    """A tokenizer does not exist or cannot be read."""

    code = "T605"


class DataFormatError(TesseraError, ValueError):
    """A data file has a format that is not text."""

    code = "T606"


class BadRecordError(TesseraError, ValueError):
    """Records of the data have no text under the configured key."""

    code = "T607"


class TokenCacheError(TesseraError, ValueError):
    """Prepared tokens cannot be written, or are damaged."""

    code = "T608"
