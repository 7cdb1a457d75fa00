# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: bytes, ``tokenizers`` JSON files, sentencepiece models.

The two libraries are the optional extra ``tessera[tokenizers]`` and are imported when
a file of theirs is named. Nothing is ever downloaded.
"""

import importlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tessera.errors import TokenizerError, did_you_mean
from tessera.regular_files import check_regular

Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]

# What the common model families call the token that stands between documents.
_SEPARATORS = (
    *("<bos>", "<s>", "<|begin_of_text|>", "<|begin▁of▁sentence|>", "[BOS]"),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]", "[SEP]"),
)


class Tokenizer(Protocol):
    """What the rest of the data pipeline knows of a tokenizer.

    Attributes:
      kind: ``bytes``, ``tokenizers``, ``sentencepiece`` or ``synthetic``.
      vocab_size: Ids run from 0 to this, exclusive.
      separator: The id that stands before every document, or None.
    """

    kind: str
    vocab_size: int
    separator: int | None

    def encode(self, text: str | bytes) -> Ids:
        """Token ids, int32 [tokens], without a separator.

        Raises:
          UnicodeDecodeError: The tokenizer needs UTF-8 and these bytes are not.
        """
        ...

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """The text of ``ids``; those that stand for no text are left out."""
        ...

    def token(self, number: int) -> str:
        """What the vocabulary calls an id that ``encode`` gave."""
        ...


class ByteTokenizer:
    """Each byte is its own id; 256 separates documents. Takes any file.

    Example:
      >>> tokenizer = ByteTokenizer()
      >>> tokenizer.encode("hé")
      array([104, 195, 169], dtype=int32)
      >>> tokenizer.decode([256, 104, 195, 169])
      'hé'
    """

    kind = "bytes"
    vocab_size = 257
    separator: int | None = 256

    def encode(self, text: str | bytes) -> Ids:
        """One id a byte; a string is taken as UTF-8."""
        content = text.encode() if isinstance(text, str) else text
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """UTF-8 text; a broken character becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def token(self, number: int) -> str:
        """The byte in hexadecimal."""
        return f"0x{number:02x}"


class JsonTokenizer:
    """A file of the ``tokenizers`` library, as ``tokenizer.json`` of many models.

    Truncation and padding that the file asks for are switched off: text is packed,
    so both would lose or make up tokens. Special tokens are neither added nor looked
    for in the text: a document that holds the characters ``<bos>`` is only text.
    """

    kind = "tokenizers"

    def __init__(self, path: Path) -> None:
        library = _import_extra("tokenizers", path)
        self._path = path
        try:
            self._tokenizer: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise _unreadable(path, "tokenizers", error) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # The count would be too small where ids have gaps.
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.separator: int | None = next(
            (vocab[name] for name in _SEPARATORS if name in vocab), None
        )

    def encode(self, text: str | bytes) -> Ids:
        """Token ids of UTF-8 text."""
        content = text if isinstance(text, str) else text.decode()
        try:
            encoding = self._tokenizer.encode(content, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"the tokenizer {str(self._path)!r} has no ids for this text",
                got=" ".join(str(error).split()),
                fix="give it an unknown token that its vocabulary has, or use another",
            ) from error
        return _as_ids(encoding.ids)

    def token(self, number: int) -> str:
        """The token's name."""
        return self._tokenizer.id_to_token(number)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


class SentencePieceTokenizer:
    """A sentencepiece model, as ``tokenizer.model`` of Gemma and others."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        library = _import_extra("sentencepiece", path)
        self._processor: Any = library.SentencePieceProcessor()
        try:
            # From memory: given a file name, the library prints on its own.
            self._processor.LoadFromSerializedProto(path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise _unreadable(path, "sentencepiece", error) from error
        self.vocab_size: int = self._processor.get_piece_size()
        ends = (self._processor.bos_id(), self._processor.eos_id())
        self.separator: int | None = next((i for i in ends if i >= 0), None)

    def encode(self, text: str | bytes) -> Ids:
        """Token ids of UTF-8 text."""
        content = text if isinstance(text, str) else text.decode()
        return _as_ids(self._processor.encode(content))

    def token(self, number: int) -> str:
        """The piece, with ``▁`` for a blank."""
        return self._processor.id_to_piece(number)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """Text without control tokens."""
        return self._processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that ``data.tokenizer=`` names.

    Args:
      name: ``bytes``, or the path of a .json or .model file.

    Raises:
      TokenizerError: [T605] there is no such tokenizer or file, the file is not one,
        or the library that reads it is not installed.

    Example:
      >>> load_tokenizer("bytes").vocab_size
      257
    """
    if name == "bytes":
        return ByteTokenizer()
    try:
        path = Path(name).expanduser()
        if there := path.is_file():
            check_regular(path)
    # A name that is too long, a folder without leave, ~ of a user who is none.
    except (OSError, RuntimeError) as error:
        path, there = Path(name), False
        why = f": {getattr(error, 'strerror', None) or error}"
    else:
        why = ""
    if path.suffix not in (".json", ".model"):
        raise TokenizerError(
            f"there is no tokenizer {name!r}",
            got=f"data.tokenizer={name}",
            fix=did_you_mean(name, ["bytes"]) + ", the path of a tokenizers file "
            "(.json) or of a sentencepiece model (.model)",
        )
    if not there:
        raise TokenizerError(
            f"the tokenizer file {name!r} does not exist",
            got=f"no file at {path.absolute()}{why}",
            fix="give data.tokenizer a file on this machine, or use bytes; nothing is "
            "downloaded",
        )
    return (
        JsonTokenizer(path)
        if path.suffix == ".json"
        else (SentencePieceTokenizer(path))
    )


def _as_ids(numbers: list[int]) -> Ids:
    """Token ids as int32; those of a file that has larger ones stay as they are."""
    ids = np.array(numbers, np.int64)
    return ids if ids.size and ids.max() >= 2**31 else ids.astype(np.int32)


def _import_extra(library: str, path: Path) -> ModuleType:
    try:
        with warnings.catch_warnings():
            # SWIG's types warn on Python 3.12, whoever imports them.
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(library)
    except ImportError as error:
        raise TokenizerError(
            f"reading {path.name!r} needs the library {library!r}",
            got=str(error),
            fix="run: pip install 'tessera[tokenizers]'\n"
            "or use data.tokenizer=bytes, which needs nothing",
        ) from error


def _unreadable(path: Path, library: str, error: Exception) -> TokenizerError:
    return TokenizerError(
        f"the library {library!r} cannot read {str(path)!r}",
        got=" ".join(str(error).split()) or type(error).__name__,
        fix="give a .json file that tokenizers saved or a .model file that "
        "sentencepiece trained",
    )
