# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: bytes, and ``tokenizers`` JSON files with their folders.

The library is the extra ``tessera-spmd[tokenizers]`` and is imported when such a file
is used. Nothing is ever downloaded.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tessera.errors import TesseraError, TokenizerError, did_you_mean
from tessera.train.data.optional_libraries import import_extra
from tessera.train.data.tokenizer_folder import (
    LONGEST_FILE,
    TOKENIZER_FILE,
    folder_files,
    read_folder,
)
from tessera.train.files.hub import local_path
from tessera.train.files.regular_files import check_regular, read_regular

Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]

# Names of the document separator in common model families.
_SEPARATORS = (
    "<bos>",
    "<s>",
    "<|begin_of_text|>",
    "<|begin▁of▁sentence|>",
    "[BOS]",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "</s>",
    "[EOS]",
    "[SEP]",
)


class Tokenizer(Protocol):
    """The interface of a tokenizer to the rest of the data pipeline.

    Attributes:
      kind: ``bytes``, ``tokenizers`` or ``synthetic``.
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
        """The ids of several texts, as ``encode`` returns them; often in less time."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """The text of ``ids``, without special tokens."""
        ...

    def token(self, number: int) -> str:
        """The name in the vocabulary of an id that ``encode`` returned."""
        ...


class ByteTokenizer(Tokenizer):
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
        self.folder = read_folder(path)
        with _coded(partial(_unreadable, path)):
            self._load(library)

    def _load(self, library: ModuleType) -> None:
        path = self._path
        content = read_regular(path, LONGEST_FILE)
        self._tokenizer: Any = library.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # The special tokens that the file puts before a text.
        self.prefix: list[int] = self._tokenizer.encode("").ids
        # It would add special tokens, and cut spaces off the offsets of tokens.
        self._tokenizer.post_processor = None
        self._add_tokens(library)
        self._tokenizer.encode_special_tokens = True
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # The number of entries would be too small if ids have gaps.
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        named = self.folder.separator
        if named is not None and named not in vocab:
            raise TokenizerError(
                "the tokenizer does not have the token that begins its texts",
                got=f"tokenizer_config.json: {named!r}, which {path.name} does not "
                "have",
                fix="use the files of one tokenizer",
            )
        names = _SEPARATORS if named is None else (named,)
        self.separator: int | None = next(
            (vocab[name] for name in names if name in vocab), None
        )

    def _add_tokens(self, library: ModuleType) -> None:
        """Add the tokens of ``tokenizer_config.json`` that the file itself lacks."""
        present = self._tokenizer.get_added_tokens_decoder()
        for number, values in sorted(self.folder.added_tokens.items()):
            names = ("single_word", "lstrip", "rstrip", "normalized", "special")
            flags = {name: values[name] for name in names if name in values}
            token = library.AddedToken(values["content"], **flags)
            if present.get(number) != token:
                self._tokenizer.add_tokens([token])
            if self._tokenizer.token_to_id(values["content"]) != number:
                raise TokenizerError(
                    "the files of the tokenizer contradict each other",
                    got=f"tokenizer_config.json: {values['content']!r} is id {number}\n"
                    f"{self._path.name}: it is id "
                    f"{self._tokenizer.token_to_id(values['content'])}",
                    fix="use the files of one tokenizer",
                )

    def encode(self, text: str | bytes) -> Ids:
        """Token ids of UTF-8 text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """Token ids of several texts in UTF-8."""
        contents = [text if isinstance(text, str) else text.decode() for text in texts]
        # Fast: without the offsets of the tokens in the text.
        encodings = self._call(self._tokenizer.encode_batch_fast, contents)
        return [_as_ids(encoding.ids) for encoding in encodings]

    def encode_chat(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Token ids of what a chat template wrote, in which special tokens are such.

        Returns:
          The ids, and the characters of each token, [tokens, 2]: begin and end.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            encoding = self._call(self._tokenizer.encode, text)
        finally:
            self._tokenizer.encode_special_tokens = True
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return _as_ids(encoding.ids), offsets

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens by their names."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {one.content: number for number, one in added.items() if one.special}

    def _call(self, encode: Callable[..., Any], text: str | list[str]) -> Any:
        with _coded(self._no_ids):
            return encode(text, add_special_tokens=False)

    def _no_ids(self, error: BaseException) -> TokenizerError:
        return TokenizerError(
            f"the tokenizer {str(self._path)!r} has no ids for this text",
            got=" ".join(str(error).split()),
            fix="add an unknown token to its vocabulary, or use another tokenizer",
        )

    def token(self, number: int) -> str:
        """The token's name."""
        return self._tokenizer.id_to_token(number)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        """Text without special tokens."""
        numbers = [int(i) for i in ids if 0 <= i < self.vocab_size]
        with _coded(partial(_unreadable, self._path)):
            return self._tokenizer.decode(numbers)


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of ``data.tokenizer``.

    Args:
      name: ``bytes``, the path of a .json file, or a folder with tokenizer.json.
        What tokenizer_config.json beside such a file says is used.

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
        path = Path(local_path(name)).expanduser()
        if path.is_dir():
            path = _file_in(path)
        if exists := path.is_file():
            check_regular(path)
    # A name that is too long, an unreadable folder, ~ of a user who does not exist.
    except (OSError, RuntimeError) as error:
        path, exists = Path(name), False
        why = f": {getattr(error, 'strerror', None) or error}"
    else:
        why = ""
    if path.suffix != ".json":
        raise TokenizerError(
            f"there is no tokenizer {name!r}",
            got=f"data.tokenizer={name}",
            fix=did_you_mean(name, ["bytes"]) + ", the path of a tokenizers file "
            "(.json) or of a folder with one; Hugging Face Transformers makes one of a "
            "sentencepiece model: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
        )
    if not exists:
        raise TokenizerError(
            f"the tokenizer file {name!r} does not exist",
            got=f"no file at {path.absolute()}{why}",
            fix="set data.tokenizer to a file on this machine, to a model of the Hub "
            "(hf://<organization>/<name>), or to bytes",
        )
    return JsonTokenizer(path)


def end_of_text(tokenizer: Tokenizer) -> tuple[str, int | None]:
    """The token that ends a text: ``eos_token`` with its name, else the separator.

    Returns:
      The name, empty for a separator, and the id; None if there is neither.
    """
    if isinstance(tokenizer, JsonTokenizer):
        name = tokenizer.folder.special_tokens.get("eos_token", "")
        if (number := tokenizer.special_tokens.get(name)) is not None:
            return name, number
    return "", tokenizer.separator


def tokenizer_files(name: str) -> list[Path]:
    """The files whose content decides the ids of ``data.tokenizer``."""
    if name == "bytes":
        return []
    path = Path(local_path(name)).expanduser()
    path = _file_in(path) if path.is_dir() else path
    return [path, *folder_files(path)]


def tokenizer_fingerprint(name: str) -> str:
    """A hash of those files, 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for path in tokenizer_files(name):
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _file_in(folder: Path) -> Path:
    if (file := folder / TOKENIZER_FILE).exists():
        return file
    raise TokenizerError(
        f"the folder {str(folder)!r} has no tokenizer",
        got=f"no {TOKENIZER_FILE}",
        fix="save the tokenizer there with Hugging Face Transformers' save_pretrained, "
        "or choose another one: data.tokenizer=<file or folder>, or bytes\n"
        "or, for tessera generate, name the run that was exported",
    )


def _as_ids(numbers: list[int]) -> Ids:
    """Token ids as int32, or int64 if the tokenizer has larger ones."""
    ids = np.array(numbers, np.int64)
    return ids if ids.size and ids.max() >= 2**31 else ids.astype(np.int32)


@contextmanager
def _coded(make: Callable[[BaseException], TokenizerError]) -> Iterator[None]:
    """Turn whatever a library raises into a coded error."""
    try:
        yield
    except (TesseraError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise make(error) from error


def _unreadable(path: Path, error: BaseException) -> TokenizerError:
    return TokenizerError(
        f"the library 'tokenizers' cannot read {str(path)!r}",
        got=" ".join(str(error).split()) or type(error).__name__,
        fix="use a .json file saved by tokenizers",
    )
