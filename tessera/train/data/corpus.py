# SPDX-License-Identifier: Apache-2.0
"""Loads the data of a run: from settings to batches.

DataConfig -> units (train, validation) -> blocks of tokens -> TokenStream -> rows ->
batches; a mixture does so for each of its sources.
"""

import hashlib
import platform
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from tessera.errors import EmptyDataError, SettingValueError
from tessera.train.data.batches import (
    Share,
    order_fingerprint,
    train_batches,
    validation_batches,
)
from tessera.train.data.conversation_rows import (
    ConversationRows,
    WholeRows,
    learned_share,
)
from tessera.train.data.data_config import RECORDS, DataConfig, check
from tessera.train.data.encoding import Encoder
from tessera.train.data.files import units_of
from tessera.train.data.packing import Batch, PackedRows, TokenStream, join
from tessera.train.data.preparation import prepare
from tessera.train.data.record_rows import PreferenceRows, PromptRows
from tessera.train.data.synthetic import SyntheticTokenizer, make_documents
from tessera.train.data.tokenization import Tokenizer
from tessera.train.data.vocabulary import check_vocabulary


@dataclass(frozen=True)
class Source:
    """One source of a corpus.

    Attributes:
      name: Its name in the log and in metrics.
      title: What it reads, for messages.
      weight: Its part of the training rows, relative to the other sources.
      train_rows: The rows for training.
      validation_rows: The rows for validation.
      ignored: Keys of its records that change what others would train on.
      learned: The share of the tokens that have a loss, of conversations.
      cut: How many conversations are longer than a row; nothing if none is.
    """

    name: str
    title: str
    weight: float
    train_rows: PackedRows
    validation_rows: PackedRows
    ignored: Collection[str] = ()
    learned: float | None = None
    cut: str = ""

    def describe(self) -> list[tuple[str, str]]:
        """A few labels and texts for the log."""
        lines = [("data", self.title)]
        if ignored := self.describe_ignored():
            lines.append(("not used", ignored))
        lines.append(("train", _sizes(self.train_rows)))
        lines.append(("validation", _sizes(self.validation_rows)))
        return lines

    def describe_ignored(self) -> str:
        """The keys of its records that are not used, or nothing."""
        keys = ", ".join(sorted(self.ignored))
        return keys and f"keys of the records of {self.name}: {keys}"


def _sizes(rows: PackedRows) -> str:
    stream = rows.stream
    size = f"{stream.num_bytes:,} bytes, " if stream.num_bytes else ""
    return (
        f"{stream.num_documents:,} documents, {size}{stream.num_tokens:,} tokens, "
        f"{len(rows):,} rows of {rows.sequence_length:,}"
    )


@dataclass(frozen=True)
class Corpus:
    """Tokenized text, from which batches are drawn; made by ``load``.

    Batches are dicts of int32 arrays [rows, sequence_length]: ``tokens``; ``targets``,
    the next token, or -100 if there is none; ``segment_ids``, which count the documents
    of a row from 1 and are 0 in padding; ``positions``, from 0 in each segment.
    ``docs/guides/data.md`` defines them exactly.

    Attributes:
      tokenizer: Tokenizer of the text.
      sources: Where the rows come from: one, unless it is a mixture.
      seed: Seed of the training order.
      prefetch: Number of batches to prepare ahead.
      num_unused_ids: Ids of the tokenizer outside of the model's vocabulary; none
        occurs in the text.
    """

    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    seed: int
    prefetch: int
    num_unused_ids: int = 0

    def train(
        self,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        start_row: int = 0,
        *,
        microbatches: int = 1,
    ) -> Generator[Batch, None, None]:
        """Endless shuffled batches, prepared ahead in a thread.

        The order of rows depends only on the corpus and its seed. Any number of
        processes reads the same global batches, each its own part of them, and
        ``start_row=n`` continues after n rows, with any batch size.

        Args:
          batch_size: Rows of the global batch.
          process_index: This process.
          process_count: How many processes share each batch; divides ``batch_size``.
          start_row: Number of rows of the order to skip.
          microbatches: Each batch is this many smaller ones in sequence, and a process
            reads its part of each.

        Returns:
          Batches of ``batch_size / process_count`` rows. ``close()`` ends the thread.

        Raises:
          EmptyDataError: [T602] there are fewer rows than ``batch_size``.
          BatchSizeError: [T503] ``process_count`` does not divide ``batch_size``.
          TokenCacheError: [T608] when a batch is drawn: prepared tokens are damaged.
        """
        share = Share(batch_size, process_index, process_count, microbatches)
        self._check_size(batch_size)
        return train_batches(
            [source.train_rows for source in self.sources],
            [source.weight for source in self.sources],
            share,
            seed=self.seed,
            start_row=start_row,
            prefetch=self.prefetch,
        )

    def _check_size(self, batch_size: int) -> None:
        num_rows = [len(source.train_rows) for source in self.sources]
        if sum(num_rows) < batch_size:
            raise _too_small([source.train_rows for source in self.sources], batch_size)
        for source, rows in zip(self.sources, num_rows, strict=True):
            if not rows:
                raise EmptyDataError(
                    f"the source {source.name!r} is smaller than one row",
                    got=f"{source.train_rows.stream.num_tokens:,} tokens, and a row "
                    f"takes {source.train_rows.sequence_length + 1:,}",
                    fix="leave it out, or add text to it",
                )

    def validation(
        self,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        *,
        source: int = 0,
        limit: int | None = None,
    ) -> Generator[Batch, None, None]:
        """Every validation row of a source once, in an order that is always the same.

        The order is shuffled, so the first rows are a sample of all files.

        Args:
          batch_size: Rows of the global batch.
          process_index: This process.
          process_count: How many processes share each batch; divides ``batch_size``.
          source: The number of the source in ``sources``.
          limit: The first so many rows alone; None is all.

        Returns:
          Batches of ``batch_size / process_count`` rows; the last is padded with rows
          whose targets are all -100. Every process has the same number of batches;
          none if ``validation_fraction`` is 0.

        Raises:
          BatchSizeError: [T503] ``process_count`` does not divide ``batch_size``.
          TokenCacheError: [T608] when a batch is drawn: prepared tokens are damaged.
        """
        share = Share(batch_size, process_index, process_count)
        rows = self.sources[source].validation_rows
        return validation_batches(rows, share, prefetch=self.prefetch, limit=limit)

    @property
    def has_validation(self) -> bool:
        """Whether there is anything to validate on."""
        return any(len(source.validation_rows) for source in self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of all batches, 16 hex digits."""
        validation = _fingerprint([s.validation_rows for s in self.sources])
        return _digest(f"{sorted(self.order.items())} {validation}")

    def fingerprint_parts(self) -> dict[str, str]:
        """What ``fingerprint`` is of, for messages about ranks that differ."""
        parts = dict[str, str]()
        for source in self.sources:
            train, validation = source.train_rows, source.validation_rows
            for side, rows in (("training", train), ("validation", validation)):
                text = f"{_sizes(rows)} ({rows.stream.fingerprint})"
                parts[f"{side} text of {source.name}"] = text
        return parts

    @cached_property
    def order(self) -> Mapping[str, str | int]:
        """Everything that determines the order of training rows, for cursors."""
        rows, tokenizer = [s.train_rows for s in self.sources], self.tokenizer
        num_rows, weights = [len(r) for r in rows], [s.weight for s in self.sources]
        return {
            "text": _fingerprint(rows),
            "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size} ids",
            "sequence_length": rows[0].sequence_length,
            "rows": sum(num_rows),
            "seed": self.seed,
            "shuffle": order_fingerprint(num_rows, weights, self.seed),
        }

    def describe(self) -> str:
        """A few lines for the log: the tokenizer, the sources and their splits."""
        lines = [line for source in self.sources for line in source.describe()]
        lines[1:1] = [("tokenizer", self.describe_tokenizer())]
        lines.append(("fingerprint", self.fingerprint))
        indent = "\n" + " " * 12
        return "\n".join(
            f"{label:<12}" + text.replace("\n", indent) for label, text in lines
        )

    def warnings(self) -> list[str]:
        """What is left out of the rows, a sentence for each source."""
        return [source.cut for source in self.sources if source.cut]

    def describe_tokenizer(self) -> str:
        """The tokenizer, its ids, and what stands between two documents."""
        between = "no separator"
        if any(source.train_rows.stream.is_separated for source in self.sources):
            between = f"separator {self.tokenizer.separator}"
        unused = f", {self.num_unused_ids:,} of them not in the model's vocabulary"
        return (
            f"{self.tokenizer.kind}, {self.tokenizer.vocab_size:,} ids"
            f"{unused if self.num_unused_ids else ''}, {between}"
        )

    def describe_epochs(self, num_rows: int) -> str:
        """How often training on ``num_rows`` rows reads each source."""
        total = sum(source.weight for source in self.sources)
        return ", ".join(
            f"{num_rows * source.weight / total / len(source.train_rows):.3g} epochs "
            f"of {source.name}"
            for source in self.sources
        )


def _fingerprint(sources: Sequence[PackedRows]) -> str:
    return _digest(" ".join(rows.stream.fingerprint for rows in sources))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def load(
    config: DataConfig, *, sequence_length: int, seed: int, vocab_size: int
) -> Corpus:
    """Read, tokenize and pack the data of a configuration.

    Args:
      config: The settings.
      sequence_length: Positions in a row.
      seed: Determines the training order, and the tokens of ``synthetic``.
      vocab_size: The model's vocabulary size.

    Raises:
      DataNotFoundError: [T601] a path does not exist or cannot be read.
      EmptyDataError: [T602] there is no text, or a file is not text.
      VocabularyError: [T603] the tokenizer adds ids to every text that the model does
        not have.
      TokenRangeError: [T604] a text has a token that the model does not have.
      TokenizerError: [T605] the tokenizer does not exist or cannot be read.
      DataFormatError: [T606] a file is not text.
      BadRecordError: [T607] a record has no text or no messages.
      TokenCacheError: [T608] prepared tokens cannot be stored, or are damaged.
      SettingValueError: [T502] a setting is out of range or would be ignored.
      SettingConflictError: [T507] ``text_key`` is given, and no file has keys.

    Example:
      >>> corpus = load(DataConfig(), sequence_length=64, seed=0, vocab_size=257)
      >>> batch = next(corpus.train(8))
      >>> {array.shape for array in batch.values()}, sorted(batch)
      ({(8, 64)}, ['positions', 'segment_ids', 'targets', 'tokens'])
    """
    check(config)
    if sequence_length < 1:
        raise SettingValueError(
            "the sequence length is out of range",
            got=f"{sequence_length}",
            fix="use a value of at least 1",
        )
    if config.name == "synthetic":
        tokenizer, sources = _make_synthetic(config, sequence_length, seed, vocab_size)
    else:
        named = [
            (name, weight, Encoder(own, vocab_size))
            for name, weight, own in _sources_of(config)
        ]
        tokenizer = named[0][2].tokenizer
        sources = [
            _read_source(name, weight, encoder, sequence_length)
            for name, weight, encoder in named
        ]
    for source in sources:
        _check_text(source, config.validation_fraction)
    return Corpus(
        tokenizer=tokenizer,
        sources=tuple(sources),
        seed=seed,
        prefetch=config.prefetch,
        num_unused_ids=max(tokenizer.vocab_size - vocab_size, 0),
    )


def _sources_of(config: DataConfig) -> list[tuple[str, float, DataConfig]]:
    """The name, the weight and the settings of each source."""
    if not config.sources:
        return [(config.name, 1.0, config)]
    return [
        (name, source.weight, source.alone(config))
        for name, source in config.sources.items()
    ]


def _read_source(
    name: str, weight: float, encoder: Encoder, sequence_length: int
) -> Source:
    config = encoder.config
    kind = config.name if config.name in RECORDS else "text"
    title = f"{kind} at {config.path!r}"
    if config.name == "stdlib":
        title = f"standard library of Python {platform.python_version()}"
    blocks_of, ignored = prepare(units_of(config), encoder)
    streams = [
        TokenStream(
            (shard for block in blocks for shard in block.shards),
            is_separated=encoder.separator is not None,
        )
        for blocks in blocks_of
    ]
    of_records = {"preferences": PreferenceRows, "prompts": PromptRows}
    make: Any = of_records.get(config.name)
    if config.messages_key:
        make = ConversationRows
    if make is not None:
        sides = [make(stream, sequence_length) for stream in streams]
        learned = learned_share(sides) if config.messages_key else None
        cut = make.describe_cut(title, sides)
        return Source(name, title, weight, sides[0], sides[1], ignored, learned, cut)
    return Source(name, title, weight, *_rows(streams, sequence_length), ignored)


def _rows(
    streams: Sequence[TokenStream], sequence_length: int
) -> tuple[PackedRows, PackedRows]:
    train, validation = streams
    return (
        PackedRows(train, sequence_length, keep_tail=False),
        PackedRows(validation, sequence_length, keep_tail=True),
    )


def _make_synthetic(
    config: DataConfig, sequence_length: int, seed: int, vocab_size: int
) -> tuple[Tokenizer, list[Source]]:
    tokenizer = SyntheticTokenizer(config.synthetic.vocab_size or vocab_size)
    check_vocabulary(tokenizer, vocab_size)
    documents = make_documents(config.synthetic, tokenizer.vocab_size, seed)
    cut = len(documents) - ceil(len(documents) * config.validation_fraction)
    streams = [
        join(
            ((ids, None) for ids in part),
            separator=tokenizer.separator,
            vocab_size=vocab_size,
        )
        for part in (documents[:cut], documents[cut:])
    ]
    rows = _rows(streams, sequence_length)
    title = "synthetic patterns"
    return tokenizer, [Source(config.name, title, 1.0, *rows)]


def _check_text(source: Source, fraction: float) -> None:
    train, validation = source.train_rows.stream, source.validation_rows.stream
    if not train.num_tokens and not validation.num_tokens:
        raise EmptyDataError(
            f"there is no text in the data: {source.title}",
            got="every document is empty",
            fix="set data.path to files with text",
        )
    if fraction and not validation.num_tokens:
        raise EmptyDataError(
            f"no text is left for validation: {source.title}",
            got=f"data.validation_fraction={fraction} of {train.num_tokens:,} tokens",
            fix="raise data.validation_fraction, or use 0 for no validation",
        )
    for rows in (source.train_rows, source.validation_rows):
        if rows.stream.num_tokens and isinstance(rows, WholeRows) and not rows:
            more = rows.length_of_all - rows.sequence_length
            raise EmptyDataError(
                f"no answer begins within a row: {source.title}",
                got=f"rows of {rows.sequence_length} tokens; {source.cut}",
                fix="use other data, or another data.validation_fraction"
                + (f", or raise training.sequence_length by {more}" * (more > 0)),
            )


def _too_small(sources: Sequence[PackedRows], batch_size: int) -> EmptyDataError:
    tokens = sum(rows.stream.num_tokens for rows in sources)
    num_rows, length = sum(map(len, sources)), sources[0].sequence_length
    fixes = [f"a batch of at most {num_rows} rows"] if num_rows else []
    longest, got = max(tokens - 1, 0) // batch_size, "tokens / sequence length"
    chats = [rows for rows in sources if isinstance(rows, WholeRows)]
    if chats:  # whole conversations fill fewer tokens of a row
        longest, got = tokens // batch_size - 1, "tokens, in rows of at most"
    if longest > 0 and all(longest >= rows.longest for rows in chats):
        fixes.append(f"a sequence length of at most {longest}")
    return EmptyDataError(
        "the training data is smaller than one batch",
        got=f"{tokens:,} {got} {length:,} = {num_rows:,} rows, "
        f"and a batch takes {batch_size:,}",
        fix="use " + ", or ".join([*fixes, "more text"]),
    )
