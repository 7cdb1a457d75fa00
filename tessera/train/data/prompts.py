# SPDX-License-Identifier: Apache-2.0
"""``PromptCorpus``: prompts that a model answers, in the order of training."""

from dataclasses import dataclass
from typing import Any

from tessera.train.data.batches import training_order, validation_order
from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.corpus import Corpus
from tessera.train.data.record_rows import Prompt
from tessera.train.data.tokenization import Tokenizer, end_of_text


@dataclass(frozen=True)
class PromptCorpus(Corpus):
    """The corpus of ``data=prompts``. As batches they are rows without targets.

    Order, position and validation split are those of any corpus: ``take`` continues at
    a position with any number of prompts.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the records beside the prompt: those of the first one."""
        source = self.sources[0]
        rows: Any = source.train_rows or source.validation_rows
        return tuple(rows.prompt(0).columns)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts of the endless order of training, from position ``start`` on.

        Raises:
          EmptyDataError: [T602] all prompts are for validation.
          TokenCacheError: [T608] prepared prompts are damaged.
        """
        self._check_size(1)
        rows: Any = self.sources[0].train_rows
        positions = range(start, start + count)
        order = training_order(len(rows), self.seed, positions)
        return [rows.prompt(index) for index in order]

    def take_validation(self, limit: int | None = None) -> list[Prompt]:
        """The first prompts for validation, in an order that is always the same.

        Raises:
          TokenCacheError: [T608] prepared prompts are damaged.
        """
        rows: Any = self.sources[0].validation_rows
        return [rows.prompt(index) for index in validation_order(len(rows), limit)]


def stop_tokens(tokenizer: Tokenizer, name: str, prompt: Prompt) -> list[int]:
    """The tokens that end an answer to a prompt, and to others like it.

    Of messages they are the tokenizer's ``eos_token`` and what the chat template writes
    after an answer, such as ``<end_of_turn>``; of a text what ends texts in training.

    Args:
      tokenizer: The tokenizer.
      name: Its name, as ``data.tokenizer`` has it.
      prompt: The prompt.

    Raises:
      TokenizerError: [T605] there is no chat template.
      OperandError: [T401] the template does not accept an answer to the messages.
    """
    if (conversation := prompt.conversation) is not None:
        return sorted(ChatPrompts(tokenizer, name).ends(conversation))
    end = end_of_text(tokenizer)[1]
    return [] if end is None else [end]
