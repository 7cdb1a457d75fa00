# SPDX-License-Identifier: Apache-2.0
"""Turns records into token ids, with a mask of the tokens that are learned."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tessera.errors import EmptyDataError, TokenizerError, TokenRangeError
from tessera.train.data.chat_template import (
    AnswerRange,
    Conversation,
    ConversationError,
    is_unlearned,
)
from tessera.train.data.data_config import DataConfig
from tessera.train.data.records import Record, bad_conversation
from tessera.train.data.template_process import TemplateProcess
from tessera.train.data.tokenization import (
    Ids,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
)
from tessera.train.data.vocabulary import (
    check_separator,
    check_tokens,
    out_of_vocabulary,
)

# Characters that are encoded at a time: enough to make calls cheap.
_BATCH_SIZE: Final = 2**20


class Encoded(NamedTuple):
    """A document as tokens.

    Attributes:
      ids: Without a separator, [tokens].
      loss_mask: Which of these tokens are learned, [tokens]: the target of the position
        before each of the others is -100. None means all of them.
      num_bytes: Size of the text.
    """

    ids: Ids
    loss_mask: npt.NDArray[np.bool_] | None
    num_bytes: int


class Encoder:
    """The tokenizer of a run, and for messages its chat template.

    Args:
      config: The settings ``tokenizer``, ``messages_key`` and ``loss_on``.
      vocab_size: The model's vocabulary size.

    Attributes:
      config: The settings.
      vocab_size: The model's vocabulary size.
      tokenizer: The tokenizer.
      separator: The id before every document, or None.

    Raises:
      TokenizerError: [T605] the tokenizer does not exist, cannot be read, or has no
        chat template.
      VocabularyError: [T603] the model does not have the separator.
    """

    def __init__(self, config: DataConfig, vocab_size: int) -> None:
        self.tokenizer = load_tokenizer(config.tokenizer_name)
        self.separator: int | None = self.tokenizer.separator
        self.config, self.vocab_size = config, vocab_size
        self._template: TemplateProcess | None = None
        if config.messages_key:
            _, self._template = chat_template_of(self.tokenizer, config.tokenizer_name)
            # A template begins conversations itself.
            self.separator = None
        else:
            check_separator(self.tokenizer, vocab_size)

    def encode(self, record: Record, ignored: set[str]) -> Encoded:
        """The tokens of a record.

        Args:
          record: The record.
          ignored: Collects keys that the chat template does not read.

        Raises:
          EmptyDataError: [T602] it is not UTF-8, and the tokenizer needs that.
          TokenRangeError: [T604] it has a token that the model does not have.
          TokenizerError: [T605] the tokenizer has no ids for it.
          BadRecordError: [T607] it is a conversation that cannot be used.
        """
        loss_mask: npt.NDArray[np.bool_] | None = None
        try:
            if record.conversation is None:
                text = record.text
                ids = self.tokenizer.encode(text)
            else:
                chat = record.conversation
                text, ids, loss_mask = self._encode_chat(chat, ignored)
        except UnicodeDecodeError as error:
            raise _not_utf8(record, error) from error
        except ConversationError as error:
            unit, offset = record.unit, record.offset
            raise bad_conversation(unit, offset, str(error)) from error
        if out_of_vocabulary(ids, self.vocab_size).size:
            check_tokens(
                record.name,
                text,
                ids,
                self.tokenizer,
                self.vocab_size,
                first_line=record.first_line,
            )
        return Encoded(ids, loss_mask, _size(text))

    def _encode_chat(
        self, conversation: Conversation, ignored: set[str]
    ) -> tuple[str, Ids, npt.NDArray[np.bool_] | None]:
        assert self._template is not None
        assert isinstance(self.tokenizer, JsonTokenizer)
        ignored.update(self._template.unread(conversation))
        learns_all = self.config.loss_on == "all"
        if learns_all and not any(map(is_unlearned, conversation.messages)):
            text = self._template.render(conversation)
            return text, self.tokenizer.encode_chat(text)[0], None
        first = 0
        if self.config.loss_on == "last_turn":
            roles = [message["role"] for message in conversation.messages]
            first = len(roles) - roles[::-1].index("user") if "user" in roles else 0
        text, answers = self._template.render_answers(conversation, first)
        ids, characters = self.tokenizer.encode_chat(text)
        unlearned = [one for one in answers if not one.is_learned]
        if learns_all:
            return text, ids, ~_overlapping(characters, unlearned)
        learned = [one for one in answers if one.is_learned]
        if not learned:
            raise ConversationError("each of its answers has the weight 0")
        return text, ids, _overlapping(characters, learned)

    def encode_all(
        self, records: Iterable[Record], ignored: set[str]
    ) -> Iterator[Encoded]:
        """The tokens of records, some of which are in memory at a time.

        Raises:
          TesseraError: As ``encode``.
        """
        if self._template is not None:
            yield from (self.encode(record, ignored) for record in records)
            return
        for batch in _batches(records):
            try:
                encoded = self._encode_batch(batch)
            except (UnicodeDecodeError, TokenizerError, TokenRangeError):
                # One by one, to name the record.
                encoded = [self.encode(record, ignored) for record in batch]
            yield from encoded

    def _encode_batch(self, records: Sequence[Record]) -> list[Encoded]:
        ids = self.tokenizer.encode_batch([record.text for record in records])
        if any(out_of_vocabulary(each, self.vocab_size).size for each in ids):
            raise TokenRangeError(
                "some record has a token that the model does not have"
            )
        return [
            Encoded(each, None, _size(record.text))
            for each, record in zip(ids, records, strict=True)
        ]


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.text)
        if size >= _BATCH_SIZE:
            yield batch
            batch = list[Record]()
            size = 0
    if batch:
        yield batch


def _size(text: str | bytes) -> int:
    return len(text.encode() if isinstance(text, str) else text)


def chat_template_of(
    tokenizer: Tokenizer, name: str
) -> tuple[JsonTokenizer, TemplateProcess]:
    """A tokenizer with its chat template.

    Args:
      tokenizer: The tokenizer.
      name: Its name, as ``data.tokenizer`` has it.

    Raises:
      TokenizerError: [T605] it has none.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        raise TokenizerError(
            "conversations need a tokenizer with a chat template",
            got=f"the tokenizer {name}, of the kind {tokenizer.kind}",
            fix="use the folder of a chat model, with tokenizer.json",
        )
    folder = tokenizer.folder
    if not folder.chat_template:
        raise TokenizerError(
            "the tokenizer has no chat template",
            got=f"the tokenizer {name}: no chat_template.jinja, and no "
            "chat_template in tokenizer_config.json",
            fix="use the tokenizer of a chat model, or write chat_template.jinja",
        )
    return tokenizer, TemplateProcess(
        folder.chat_template, folder.special_tokens, folder.tool_template
    )


def _overlapping(
    characters: npt.NDArray[np.int64], answers: Sequence[AnswerRange]
) -> npt.NDArray[np.bool_]:
    """Which tokens have characters of answers, [tokens]; empty ones between too."""
    mask = np.zeros(len(characters), bool)
    for begin, end, _ in answers:
        (inside,) = np.nonzero((characters[:, 0] < end) & (characters[:, 1] > begin))
        if inside.size:
            mask[inside[0] : inside[-1] + 1] = True
    return mask


def _not_utf8(record: Record, error: UnicodeDecodeError) -> EmptyDataError:
    return EmptyDataError(
        f"the data file {record.unit.name!r} is not UTF-8 text",
        got=f"{record.unit.path}: byte 0x{error.object[error.start]:02x} at "
        f"offset {record.offset + error.start}",
        fix="convert the file to UTF-8, leave it out, or use data.tokenizer=bytes, "
        "which accepts any file",
    )
