# SPDX-License-Identifier: Apache-2.0
"""A model that writes what a script says, and environments of several kinds."""

import time

import jax
import numpy as np

from tessera.train.data.chat_template import Conversation
from tessera.train.rollouts.completions import Completion
from tessera.train.rollouts.environments import Environments
from tessera.train.rollouts.trajectories import run_turns


class Script:
    """Writes the given turns of each conversation, found by the number of its key.

    A turn is text with names of special tokens, which is encoded as a chat template's
    text is; or token ids. It ends by its last token if that is special.
    """

    def __init__(self, tokenizer, *conversations):
        self.special = set(tokenizer.special_tokens.values())
        self.turns = [
            [
                tokenizer.encode_chat(turn)[0].tolist()
                if isinstance(turn, str)
                else turn
                for turn in conversation
            ]
            for conversation in conversations
        ]
        self.calls = []

    def __call__(self, ids, keys):
        data = np.asarray(jax.random.key_data(keys)).tolist()
        self.calls.append((ids, data))
        turn = len(self.calls) - 1
        return [
            self.completion(self.turns[self.number(one, turn)][turn]) for one in data
        ]

    def number(self, data, turn):
        """Which conversation a key is of."""
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys_of(len(self.turns)), turn)
        return jax.random.key_data(folded).tolist().index(data)

    def completion(self, ids):
        log_probs = -0.25 - np.arange(len(ids), dtype=np.float32)
        return Completion(np.array(ids, np.int32), log_probs, ids[-1] in self.special)


def keys_of(count):
    return jax.random.split(jax.random.key(7), count)


def run(chat, script, make, prompt, *, count=1, only=None, **options):
    """The trajectories of one prompt's messages, and the tokens of the prompt.

    There are ``count`` conversations, or those of them whose numbers are ``only``.
    """
    conversation = Conversation(prompt)
    ids = chat.tokenizer.encode_chat(chat.render(conversation))[0]
    time_limit = options.pop("time_limit", 20.0)
    numbers = range(count) if only is None else only
    makers = [lambda i=i: make(i) for i in numbers]
    found = run_turns(
        script,
        [ids] * len(numbers),
        [conversation] * len(numbers),
        Environments(makers, time_limit),
        keys_of(count)[np.array(numbers)],
        chat,
        **{"max_turns": 8, "max_tokens": 400, **options},
    )
    return found, ids.tolist()


class Echo:
    """Answers each turn in some role until it has done so a number of times."""

    def __init__(self, times=1, role="user", reward=None):
        self.left, self.role, self.reward, self.seen = times, role, reward, []

    def step(self, messages):
        self.seen.append([dict(message) for message in messages])
        self.left -= 1
        text = f"echo {messages[-1]['content'][:9]}"
        messages.clear()  # a copy
        if self.left < 0:
            return [], self.reward, True
        return [{"role": self.role, "content": text}], self.reward, False


class Returns:
    """Returns a value, whatever it is."""

    def __init__(self, value):
        self.value = value

    def step(self, messages):
        return self.value


class Fails:
    """Ends in one of the ways in which users' code does."""

    def __init__(self, how):
        self.how = how

    def step(self, messages):
        if self.how == "hangs":
            time.sleep(30)
        if self.how == "exits":
            raise SystemExit(3)
        raise KeyError(self.how)


class NeedsColumns:
    """Is made from two columns."""

    def __init__(self, answer, level):
        self.answer = answer

    def step(self, messages):
        return [], self.answer, True


class NoStep:
    """Has no ``step``."""
