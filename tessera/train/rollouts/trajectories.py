# SPDX-License-Identifier: Apache-2.0
"""``run_turns``: a model and an environment answer each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import numpy as np
import numpy.typing as npt

from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.chat_template import Conversation
from tessera.train.rollouts.completions import Completion
from tessera.train.rollouts.environments import Answer, Environments, Messages

# From token ids and a key for each, [rows], to what a model writes after them.
Complete: TypeAlias = Callable[[list[list[int]], jax.Array], list[Completion]]


@dataclass(frozen=True)
class Trajectory:
    """What was said after a prompt.

    Attributes:
      tokens: int32 ``[n]``: what the model wrote, and what the environment answered.
      log_probs: float32 ``[n]``, the sampler's, in nats; 0 where ``is_own`` is False.
      is_own: bool ``[n]``, what the model wrote: these tokens alone are learned.
      ended: The model's last turn ended by a stop token; False where that turn, or
        the conversation, was cut at the most tokens.
      reward: The sum of the environment's; None if it gave none, or failed.
      messages: The same as text, with the environment's last messages, which have no
        tokens.
      failure: Why the environment failed, as ``raised KeyError (…)``; empty if it did
        not.
    """

    tokens: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    is_own: npt.NDArray[np.bool_]
    ended: bool
    reward: float | None = None
    messages: Messages = field(default_factory=list)
    failure: str = ""


@dataclass
class _Talk:
    """A conversation so far; the model wrote every second part, from the first on."""

    prompt: list[int]
    start: Conversation
    parts: list[Completion] = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    ended: bool = True

    @property
    def goes_on(self) -> bool:
        return self.ended and not (self.answers and self.answers[-1].is_done)

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in part.tokens.tolist()]

    @property
    def conversation(self) -> Messages:
        return [*map(dict, self.start.messages), *self.messages]

    def ask_again(self, chat: ChatPrompts, max_tokens: int) -> None:
        """Add the tokens of the environment's messages, if there is room for more."""
        new = self.answers[-1].messages
        before = self.start._replace(messages=self.conversation[: -1 - len(new)])
        own = self.parts[-1].tokens.tolist()
        ids = np.array(chat.encode_between(before, own, new), np.int32)
        self.ended = len(self.tokens) + len(ids) < max_tokens
        if self.ended:
            self.parts.append(Completion(ids, np.zeros(len(ids), np.float32), True))

    def write(self, own: Completion, chat: ChatPrompts, max_tokens: int) -> None:
        """Add what the model wrote."""
        room = max_tokens - len(self.tokens)
        self.ended = own.ended and len(own.tokens) <= room
        own = Completion(own.tokens[:room], own.log_probs[:room], self.ended)
        self.parts.append(own)
        text = chat.tokenizer.decode(own.tokens)
        self.messages.append({"role": "assistant", "content": text})

    def trajectory(self) -> Trajectory:
        rewards = [one.reward for one in self.answers if one.reward is not None]
        sizes = [len(part.tokens) for part in self.parts]
        failure = self.answers[-1].failure
        return Trajectory(
            np.concatenate([part.tokens for part in self.parts]),
            np.concatenate([part.log_probs for part in self.parts]),
            np.repeat(np.arange(len(sizes)) % 2 == 0, sizes),
            self.ended,
            sum(rewards) if rewards and not failure else None,
            self.messages,
            failure,
        )


def run_turns(
    complete: Complete,
    prompts: Sequence[Sequence[int]],
    conversations: Sequence[Conversation],
    environments: Environments,
    keys: jax.Array,
    chat: ChatPrompts,
    *,
    max_turns: int,
    max_tokens: int,
) -> list[Trajectory]:
    """Let a model and environments answer each other, all conversations together.

    The tokens of a turn follow **the tokens that the model wrote**, which are never
    decoded and encoded again. Between two turns is what the chat template writes from
    the end of an answer to the beginning of the next one. So the model reads its own
    earlier turns as it wrote them, also where the template would write them in another
    way once more messages follow: Qwen 3 leaves out the ``<think>`` of earlier turns,
    and here it stays.

    The environment sees each turn of the model, one that was cut too. The conversation
    ends after it where the environment is done, the turn was cut, there were
    ``max_turns``, or what follows does not fit in ``max_tokens``.

    With several processes of JAX, all of them call this with the same arguments.

    Args:
      complete: Such as ``Sampler.complete`` with the parameters; it is called with the
        conversations that go on, of fewer tokens than a prompt and ``max_tokens``.
      prompts: Token ids, one for each completion: a group has the same several times.
      conversations: The messages of these prompts.
      environments: Of these completions, new.
      keys: A key for each completion, [completions]. Turn t uses ``fold_in(key, t)``.
      chat: The chat template that the prompts are written by.
      max_turns: The most turns of the model, at least 1.
      max_tokens: The most tokens after a prompt, those of the environment included.

    Raises:
      OperandError: [T401] the chat template does not accept the environment's messages.
      TokenizerError: [T605] it is not known what the template writes after an answer.
    """
    pairs = zip(prompts, conversations, strict=True)
    talks = [_Talk([*map(int, ids)], start) for ids, start in pairs]
    for turn in range(max_turns):
        for talk in talks:
            if turn and talk.goes_on:
                talk.ask_again(chat, max_tokens)
        numbers = [i for i, talk in enumerate(talks) if talk.goes_on]
        if not numbers:
            break
        ids = [talks[i].prompt + talks[i].tokens for i in numbers]
        completions = complete(ids, _keys(keys, turn, numbers))
        for i, own in zip(numbers, completions, strict=True):
            talks[i].write(own, chat, max_tokens)
        said = [(i, talks[i].conversation) for i in numbers]
        for i, answer in zip(numbers, environments.step(said), strict=True):
            talks[i].answers.append(answer)
            talks[i].messages += answer.messages
    return [talk.trajectory() for talk in talks]


def _keys(keys: jax.Array, turn: int, numbers: list[int]) -> jax.Array:
    """The keys of a turn; as many are computed in each, so one program does it."""
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys, turn)
    data = jax.numpy.asarray(np.asarray(jax.random.key_data(folded))[numbers])
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
