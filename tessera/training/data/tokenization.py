# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: bytes, ``tokenizers`` JSON files and sentencepiece models.

The two libraries are the optional extra ``tessera[tokenizers]`` and are imported when
one of their files is used. Nothing is ever downloaded.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tessera.errors import TokenizerError, did_you_mean
from tessera.regular_files import check_regular
from tessera.training.data.extras import import_extra

Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]

# Names of the document separator in common model families.
_SEPARATORS = (
    *("<bos>", "<s>", "<|begin_of_text|>", "<|begin▁of▁sentence|>", "[BOS]"),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]", "[SEP]"),
)


class Tokenizer(Protocol):
    """The interface of a tokenizer to the rest of the data pipeline.

    Attributes:
      kind: ``bytes``, ``tokenizers``, ``sentencepiece`` or ``synthetic``.
      vocab_size: Ids run from 0 to this, exclusive.
      separator: The id before every document, or None.
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

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """The ids of several texts, as ``encode`` returns them, in less time."""
        ...

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """The text of ``ids``, without special tokens."""
        ...

    def token(self, number: int) -> str:
        """The name in the vocabulary of an id that ``encode`` returned."""
        ...


class ByteTokenizer:
    """Each byte is its own id; 256 separates documents. Accepts any file.

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
        """One id for each byte; a string is encoded as UTF-8."""
        content = text.encode() if isinstance(text, str) else text
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """The ids of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """UTF-8 text; invalid bytes become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def token(self, number: int) -> str:
        """The byte in hexadecimal."""
        return f"0x{number:02x}"


class JsonTokenizer:
    """A file of the ``tokenizers`` library, the ``tokenizer.json`` of many models.

    Truncation and padding are switched off even if the file enables them: text is
    packed, so they would lose or invent tokens. Special tokens are neither added nor
    recognized: the characters ``<bos>`` in a document are ordinary text.
    """

    kind = "tokenizers"

    def __init__(self, path: Path) -> None:
        library = import_extra("tokenizers", path.name, "tokenizers", TokenizerError)
        self._path = path
        try:
            self._tokenizer: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise _unreadable(path, "tokenizers", error) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # The number of entries would be too small if ids have gaps.
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.separator: int | None = next(
            (vocab[name] for name in _SEPARATORS if name in vocab), None
        )

    def encode(self, text: str | bytes) -> Ids:
        """Token ids of UTF-8 text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """Token ids of several texts in UTF-8."""
        contents = [text if isinstance(text, str) else text.decode() for text in texts]
        try:
            # Fast: without the offsets of the tokens in the text.
            encodings = self._tokenizer.encode_batch_fast(
                contents, add_special_tokens=False
            )
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"the tokenizer {str(self._path)!r} has no ids for this text",
                got=" ".join(str(error).split()),
                fix="add an unknown token to its vocabulary, or use another tokenizer",
            ) from error
        return [_as_ids(encoding.ids) for encoding in encodings]

    def token(self, number: int) -> str:
        """The token's name."""
        return self._tokenizer.id_to_token(number)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


class SentencePieceTokenizer:
    """A sentencepiece model, the ``tokenizer.model`` of Gemma and others."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        library = import_extra("sentencepiece", path.name, "tokenizers", TokenizerError)
        self._processor: Any = library.SentencePieceProcessor()
        try:
            # From memory: if given a file name, the library prints errors itself.
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

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """Token ids of several texts in UTF-8."""
        return [self.encode(text) for text in texts]

    def token(self, number: int) -> str:
        """The piece, with ``▁`` for a space."""
        return self._processor.id_to_piece(number)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """Text without control tokens."""
        return self._processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of ``data.tokenizer``.

    Args:
      name: ``bytes``, or the path of a .json or .model file.

    Raises:
      TokenizerError: [T605] there is no such tokenizer or file, it cannot be read, or
        the library that reads it is not installed.

    Example:
      >>> load_tokenizer("bytes").vocab_size
      257
    """
    if name == "bytes":
        return ByteTokenizer()
    try:
        path = Path(name).expanduser()
        if exists := path.is_file():
            check_regular(path)
    # A name that is too long, an unreadable folder, ~ of a user who does not exist.
    except (OSError, RuntimeError) as error:
        path, exists = Path(name), False
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
    if not exists:
        raise TokenizerError(
            f"the tokenizer file {name!r} does not exist",
            got=f"no file at {path.absolute()}{why}",
            fix="set data.tokenizer to a file on this machine, or use bytes; nothing "
            "is downloaded",
        )
    return (JsonTokenizer if path.suffix == ".json" else SentencePieceTokenizer)(path)


def tokenizer_files(name: str) -> list[Path]:
    """The files whose content decides the ids of ``data.tokenizer``."""
    return [] if name == "bytes" else [Path(name).expanduser()]


def _as_ids(numbers: list[int]) -> Ids:
    """Token ids as int32, or int64 if the tokenizer has larger ones."""
    ids = np.array(numbers, np.int64)
    return ids if ids.size and ids.max() >= 2**31 else ids.astype(np.int32)


def _unreadable(path: Path, library: str, error: Exception) -> TokenizerError:
    return TokenizerError(
        f"the library {library!r} cannot read {str(path)!r}",
        got=" ".join(str(error).split()) or type(error).__name__,
        fix="use a .json file saved by tokenizers or a .model file trained by "
        "sentencepiece",
    )
