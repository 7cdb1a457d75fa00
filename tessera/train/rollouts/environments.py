# SPDX-License-Identifier: Apache-2.0
"""``Environment``: what answers a model between its turns, such as tools or a game."""

import inspect
import json
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from tessera.errors import SettingValueError
from tessera.train.checkpoints.first_process import broadcast_from_first
from tessera.train.files.user_modules import described, import_user_module

Messages: TypeAlias = list[dict[str, Any]]

_AT_ONCE: Final = 64
_LARGEST: Final = 1e30  # sums of such rewards are finite in float32


class Environment(Protocol):
    """What a class of ``grpo.environment=my_module:MyClass`` has.

    Each completion has an instance of its own, made from the other columns of its
    prompt's record: ``__init__(self, answer, **columns)``.
    """

    def step(self, messages: Messages) -> tuple[Messages, float | None, bool]:
        """Answer the model's last message.

        Args:
          messages: A copy of the conversation. The last message is the model's: its
            ``content`` is text without special tokens. Calls of tools are a part of
            that text, as the model writes them, and nothing parses them before.

        Returns:
          The messages that follow, of the role ``tool`` or ``user``; a reward, or None;
          and whether the conversation is over. The rewards of all steps are added.
        """
        ...


class Answer(NamedTuple):
    """What an environment returned, or why it failed."""

    messages: Messages
    reward: float | None
    is_done: bool
    failure: str = ""


def load_environment(name: str, columns: Sequence[str]) -> Callable[..., Environment]:
    """The class that ``module:Class`` names; the current folder is searched too.

    Args:
      name: The name.
      columns: Names of the columns that its instances will be made from.

    Raises:
      SettingValueError: [T502] there is no such class, it has no method ``step``, or
        cannot be made from these columns.
    """
    try:
        module, _, attribute = name.partition(":")
        found = getattr(import_user_module(module), attribute)
        inspect.signature(found.step)
        inspect.signature(found).bind(**dict.fromkeys(columns))
    except Exception as error:
        raise SettingValueError(
            f"the environment {name!r} cannot be used",
            got=f"{described(error)}\ncolumns of the records: {', '.join(columns)}",
            fix="write grpo.environment=my_module:MyClass for a class with the methods "
            "__init__(self, answer, **columns), where answer is a column, and "
            "step(self, messages), which returns (messages, reward, done)",
        ) from error
    return found


class Environments:
    """The environments of several completions.

    They step in threads, 64 at a time, and in JAX's first process alone.
    One that raises, takes too long, or returns what it should not has failed: that
    costs its own completion, and never ends the run.

    Args:
      makers: Make the environment of each completion, when it first steps.
      time_limit: Seconds that a step may take. One that hangs keeps its thread until
        the program ends.
    """

    def __init__(
        self, makers: Sequence[Callable[[], Environment]], time_limit: float = 120.0
    ) -> None:
        self._makers, self._time_limit = makers, time_limit
        self._made = dict[int, Environment]()

    def step(self, talks: Sequence[tuple[int, Messages]]) -> list[Answer]:
        """The answers to conversations, each with the number of its completion."""
        found = broadcast_from_first(lambda: {"answers": self._step(talks)})
        return [Answer(*answer) for answer in found["answers"]]

    def _step(self, talks: Sequence[tuple[int, Messages]]) -> list[Answer]:
        late = Answer([], None, True, f"took longer than {self._time_limit:g} s")
        answers = [late] * len(talks)

        def work(place: int, number: int, messages: Messages) -> None:
            try:
                if number not in self._made:
                    self._made[number] = self._makers[number]()
                # A copy: one that is late may write in it.
                given = json.loads(json.dumps(messages))
                answers[place] = _checked(self._made[number].step(given))
            except BaseException as error:
                answers[place] = Answer([], None, True, f"raised {described(error)}")

        for begin in range(0, len(talks), _AT_ONCE):
            threads = list[Thread]()
            for place, talk in enumerate(talks[begin : begin + _AT_ONCE], begin):
                threads.append(Thread(target=work, args=(place, *talk), daemon=True))
                threads[-1].start()
            deadline = time.monotonic() + self._time_limit
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0))
        return [*answers]


def _checked(answer: Any) -> Answer:
    """What a step returned, or that it is not what the protocol says."""
    try:
        messages, reward, is_done = answer
        # Other processes get JSON, and no tokenizer takes half of a surrogate pair.
        content = json.dumps([*(messages or ())], ensure_ascii=False).encode()
        messages = json.loads(content)
        texts = [each[key] for key in ("role", "content") for each in messages]
        is_legal = all(isinstance(text, str) for text in texts)
        is_legal &= "assistant" not in texts[: len(messages)]
        number = 0.0 if reward is None else float(reward)
        is_legal &= abs(number) < _LARGEST
        is_legal &= {str, bytes}.isdisjoint(map(type, (reward, is_done)))
        if is_legal and (messages or is_done):
            return Answer(messages, None if reward is None else number, bool(is_done))
    except (TypeError, ValueError, LookupError, OverflowError):
        pass
    why = "did not return (new messages unless done, finite reward or None, done)"
    return Answer([], None, True, f"{why} ({answer!r:.200})")
