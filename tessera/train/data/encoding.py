# SPDX-License-Identifier: Apache-2.0
"""Turns records into token ids, with a mask of the tokens that are learned."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.errors import EmptyDataError, TokenizerError, TokenRangeError
from tessera.train.data.chat_template import (
    AnswerRange,
    Conversation,
    ConversationError,
    is_unlearned,
)
from tessera.train.data.data_config import RECORDS, DataConfig
from tessera.train.data.record_values import Preference, common_length
from tessera.train.data.records import Record, bad_conversation
from tessera.train.data.template_process import TemplateProcess
from tessera.train.data.tokenization import (
    Ids,
    JsonTokenizer,
    Tokenizer,
    end_of_text,
    load_tokenizer,
)
from tessera.train.data.vocabulary import (
    check_separator,
    check_tokens,
    out_of_vocabulary,
)

# A text, its tokens, and which of them are learned; None is all.
_Learned: TypeAlias = tuple[str, Ids, npt.NDArray[np.bool_]]
_Document: TypeAlias = tuple[str | bytes, Ids, npt.NDArray[np.bool_] | None]
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
        self._begin = [] if self.separator is None else [self.separator]
        if config.messages_key:
            _ = self._chat
        if config.messages_key or config.name in RECORDS:
            # A template begins conversations itself, and ``_begin`` other texts.
            self.separator = None
        else:
            check_separator(self.tokenizer, vocab_size)

    @cached_property
    def _chat(self) -> tuple[JsonTokenizer, TemplateProcess]:
        return chat_template_of(self.tokenizer, self.config.tokenizer_name)

    def encode(self, record: Record, ignored: set[str]) -> list[Encoded]:
        """The tokens of a record: of a preference or a prompt as two documents.

        The two of a preference are the better and the worse answer, each after the
        prompt; an answer that does not exist is the first token of the other, and not
        learned. Those of a prompt are its tokens, and its record, a token a byte of
        JSON.

        Args:
          record: The record.
          ignored: Collects keys that the chat template does not read.

        Raises:
          EmptyDataError: [T602] it is not UTF-8, and the tokenizer needs that.
          TokenRangeError: [T604] it has a token that the model does not have.
          TokenizerError: [T605] the tokenizer has no ids for it.
          BadRecordError: [T607] it is a conversation that cannot be used.
        """
        try:
            documents = self._documents(record, ignored)
        except UnicodeDecodeError as error:
            raise _not_utf8(record, error) from error
        except ConversationError as error:
            unit, offset = record.unit, record.offset
            raise bad_conversation(unit, offset, str(error), self.config) from error
        for text, ids, _ in documents:
            if out_of_vocabulary(ids, self.vocab_size).size:
                check_tokens(
                    record.name,
                    text,
                    ids,
                    self.tokenizer,
                    self.vocab_size,
                    first_line=record.first_line,
                )
        encoded = [Encoded(ids, mask, _size(text)) for text, ids, mask in documents]
        if record.columns:
            content = np.frombuffer(record.columns.encode(), np.uint8)
            encoded.append(Encoded(content.astype(np.int32), None, 0))
        return encoded

    def _documents(self, record: Record, ignored: set[str]) -> Sequence[_Document]:
        if record.preference is not None:
            return self._encode_pair(record.preference, ignored)
        if (chat := record.conversation) is None:
            ids = self.tokenizer.encode(record.text)
            if record.columns:
                ids = np.array([*self._begin, *ids.tolist()])
            return [(record.text, ids, None)]
        tokenizer, template = self._chat
        ignored.update(template.unread(chat))
        if not record.columns:
            return [self._encode_chat(chat)]
        text = template.render(chat, add_generation_prompt=True)
        return [(text, tokenizer.encode_chat(text)[0], None)]

    def _encode_pair(self, pair: Preference, ignored: set[str]) -> list[_Learned]:
        sides = (pair.chosen, pair.rejected)
        texts = [side for side in sides if isinstance(side, str)]
        made = self._encode_texts(texts, pair.shared) if texts else []
        for side in sides:
            if isinstance(side, Conversation):
                ignored.update(self._chat[1].unread(side))
                made.append(self._encode_answers(side, pair.shared))
        if len(made) == 2 and made[0][1].tolist() == made[1][1].tolist():
            sides = (None, None)  # no preference
            made.clear()
        # Where tokens merge over the end of the prompt, both answers begin before it.
        first = min((int(mask.argmax()) for _, _, mask in made), default=0)
        for _, _, mask in made:
            mask[first : mask.argmax()] = True
        ids = made[0][1][:1] if made else np.zeros(1, np.int32)
        absent, left = ("", ids, np.zeros(1, bool)), iter(made)
        return [absent if side is None else next(left) for side in sides]

    def _encode_texts(self, texts: Sequence[str], shared: int) -> list[_Learned]:
        """Texts with the token that ends them; what follows the prompt is learned.

        The prompt ends where its own tokens and those of a text differ: a token that
        spans the boundary is learned, as in TRL.
        """
        name, end = end_of_text(self.tokenizer)
        if end is None:
            raise TokenizerError(
                "the tokenizer has no token that ends an answer",
                got=f"the tokenizer {self.config.tokenizer_name}: no eos_token",
                fix="name one in tokenizer_config.json, or use messages and a template",
            )
        whole = [text.removesuffix(name) for text in texts]
        batch = self.tokenizer.encode_batch([texts[0][:shared], *whole])
        prompt, *lists = (each.tolist() for each in batch)
        made = list[_Learned]()
        for text, ids in zip(whole, lists, strict=True):
            first = len(self._begin) + common_length(prompt, ids)
            tokens = np.array([*self._begin, *ids, end])
            made.append((text, tokens, np.arange(tokens.size) >= first))
        return made

    def _encode_answers(self, conversation: Conversation, first: int) -> _Learned:
        """A conversation, of which the answers from a message on are learned."""
        tokenizer, template = self._chat
        text, answers = template.render_answers(conversation, first)
        ids, characters = tokenizer.encode_chat(text)
        learned = [one for one in answers if one.is_learned]
        if len(learned) < (len(answers) if self.config.name in RECORDS else 1):
            count = "one" if learned else "each"
            raise ConversationError(f"{count} of its answers has the weight 0")
        return text, ids, _overlapping(characters, learned)

    def _encode_chat(self, conversation: Conversation) -> _Document:
        tokenizer, template = self._chat
        learns_all = self.config.loss_on == "all"
        if learns_all and not any(map(is_unlearned, conversation.messages)):
            text = template.render(conversation)
            return text, tokenizer.encode_chat(text)[0], None
        first = 0
        if self.config.loss_on == "last_turn":
            roles = [message["role"] for message in conversation.messages]
            first = len(roles) - roles[::-1].index("user") if "user" in roles else 0
        if not learns_all:
            return self._encode_answers(conversation, first)
        text, answers = template.render_answers(conversation)
        ids, characters = tokenizer.encode_chat(text)
        unlearned = [one for one in answers if not one.is_learned]
        return text, ids, ~_overlapping(characters, unlearned)

    def encode_all(
        self, records: Iterable[Record], ignored: set[str]
    ) -> Iterator[Encoded]:
        """The tokens of records, some of which are in memory at a time.

        Raises:
          TesseraError: As ``encode``.
        """
        if self.config.messages_key or self.config.name in RECORDS:
            for record in records:
                yield from self.encode(record, ignored)
            return
        for batch in _batches(records):
            try:
                encoded = self._encode_batch(batch)
            except (UnicodeDecodeError, TokenizerError, TokenRangeError):
                # One by one, to name the record.
                encoded = [*chain(*(self.encode(each, ignored) for each in batch))]
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
