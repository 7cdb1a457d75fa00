# SPDX-License-Identifier: Apache-2.0
"""Scores completions by functions, in several processes, and by models, in this one."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.errors import RewardError, printable
from tessera.train.rewards.reward_functions import Arguments, Outcome, Outcomes
from tessera.train.rewards.reward_names import parse_names
from tessera.train.rewards.reward_process import RewardProcess

CALL: Final = 16
"""The most completions of one call of a function."""

Column: TypeAlias = Sequence[Any]
# Scores completions after their prompts, in this process.
ModelReward: TypeAlias = Callable[[Column, Column], Sequence[Outcome]]
# A function, and outcomes of completions; that of a call that is repeated is at -1.
_Part: TypeAlias = tuple[int, list[tuple[int, Outcome]]]


@dataclass(frozen=True)
class Scores:
    """The rewards of N completions by K functions.

    Attributes:
      names: Of the functions; of two with one name, the second is ``regex_2``.
      by_name: f64 ``[N, K]``, without weights; NaN where one is missing.
      total: f64 ``[N]``, the sum of weight times reward over those that are not
        missing; NaN where ``is_missing``.
      is_missing: bool ``[N]``: no function with a weight other than 0 has judged it,
        so the completion must not count.
      notes: A line for each kind of failure of each function in this call.
    """

    names: tuple[str, ...]
    by_name: npt.NDArray[np.float64]
    total: npt.NDArray[np.float64]
    is_missing: npt.NDArray[np.bool_]
    notes: tuple[str, ...] = ()

    @classmethod
    def none(cls, count: int) -> "Scores":
        """Those of no functions: all are missing."""
        missing = np.full(count, np.nan)
        return cls((), np.empty((count, 0)), missing, np.ones(count, bool))

    def joined(self, name: str, values: Sequence[float | None]) -> "Scores":
        """With another reward, of weight 1; None is a missing one."""
        column = np.array(values, np.float64)
        is_missing = self.is_missing & np.isnan(column)
        total = np.nansum([self.total, column], axis=0)
        return Scores(
            (*self.names, name),
            np.column_stack([self.by_name, column]),
            np.where(is_missing, np.nan, total),
            is_missing,
            self.notes,
        )


def _no_run(name: str) -> ModelReward:
    raise RewardError(
        "a reward by a model needs the mesh of a run",
        got=name,
        fix="name it on the command line of a run: rewards=[./model]",
    )


class Rewards(AbstractContextManager["Rewards"]):
    """Reward functions in processes that are not this one; a context manager.

    **A reward is missing** where its function returns None, which is its right, and
    where it fails: it raises, takes longer than the time limit, ends its process,
    returns NaN, inf or no number, or a list of another length. A failure never ends
    the run, and ``Scores.notes`` has it.

    A call has at most 16 completions, always the same ones however many processes and
    hosts there are. One that fails is repeated with each completion by itself, for at
    most twice the time limit together: a completion on which a function hangs does not
    cost the others theirs. So a function judges each completion by itself, and does not
    see the whole group.

    A function sees copies, in which it may write; what it prints goes to standard
    error. Its process imports no JAX, and the environment hides accelerators from it.
    It may have 16 GiB of address space, and ends with this process. Models score here
    meanwhile.

    Args:
      names: As ``parse_names`` reads them: K functions, which are imported and checked
        in a process that is then ready to score, and models.
      weights: One for each name; None is 1 for each.
      columns: What ``score`` will be given beside prompts and completions: columns of
        the records, and ``completion_ids``, the tokens, as TRL calls them.
      open_model: Makes what scores of the name of a model. All processes of JAX take
        part in scoring, and have the same outcomes.
      time_limit: Seconds that a call may take.
      processes: How many calls run at a time, on each host.

    Raises:
      RewardError: [T720] a name, weight or function cannot be used; or there is no
        run for a model.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        *,
        columns: Sequence[str] = (),
        open_model: Callable[[str], ModelReward] = _no_run,
        time_limit: float = 30.0,
        processes: int = 4,
    ) -> None:
        parsed = parse_names(names)
        weights = [1.0] * len(names) if weights is None else weights
        self._weights = np.array(weights, np.float64)
        is_useful = np.isfinite(self._weights).all() and self._weights.any()
        if len(weights) != len(names) or not is_useful:
            raise RewardError(
                "each reward needs a weight, and one of them is not 0",
                got=f"rewards={list(names)}, weights {list(weights)}",
                fix="write rewards=[exact,my_rewards:format] and weights [1.0,0.5]",
            )
        self.names = tuple(name.label for name in parsed)
        self._columns, self._time_limit = tuple(columns), time_limit
        # Their columns, as functions and models may be in any order.
        self._functions = [k for k, name in enumerate(parsed) if not name.is_model]
        own = [parsed[k] for k in self._functions]
        self._threads = ThreadPoolExecutor(processes, "rewards")
        self._all = [RewardProcess(own, self._columns) for _ in range(processes)]
        try:
            if own:
                self._all[0].start()
            self._models = {
                k: open_model(name.text)
                for k, name in enumerate(parsed)
                if name.is_model
            }
        except BaseException:
            self.close()
            raise

    def score(
        self, prompts: Column, completions: Column, columns: Mapping[str, Column]
    ) -> Scores:
        """The rewards of completions.

        With several processes of JAX, all of them call this with the same arguments.
        Each scores its share of the calls, and all have the same result.

        Args:
          prompts: The prompt of each completion: N texts, or lists of messages.
          completions: N texts, or lists of messages.
          columns: N values for each column of ``columns``.
        """
        import jax

        arguments = {**columns, "prompts": prompts, "completions": completions}
        count = len(completions)
        assert columns.keys() == set(self._columns), (list(columns), self._columns)
        assert all(len(values) == count for values in arguments.values())
        tasks = [(k, i) for i in range(0, count, CALL) for k in self._functions]
        own = iter(tasks[jax.process_index() :: jax.process_count()])

        def parts(process: RewardProcess) -> list[_Part]:
            return [self._part(process, *task, arguments) for task in own]

        found = self._threads.map(parts, self._all)
        of_models: list[_Part] = [
            (k, list(enumerate(score(prompts, completions))))
            for k, score in self._models.items()
        ]
        of_functions = _from_all_processes(list(chain.from_iterable(found)))
        by_name = np.full((count, len(self.names)), np.nan)
        examples, missing = dict[tuple[int, str], str](), Counter[tuple[int, str]]()
        for reward, outcomes in (*of_functions, *of_models):
            for i, outcome in outcomes:
                if isinstance(outcome, str):
                    key = reward, outcome.partition(" (")[0]
                    examples.setdefault(key, printable(outcome))
                    missing[key] += i >= 0
                elif outcome is not None:
                    by_name[i, reward] = outcome
        total = np.nansum(by_name * self._weights, 1)
        is_missing = np.asarray(np.isnan(by_name[:, self._weights != 0]).all(1))
        total[is_missing] = np.nan
        notes = tuple(
            f"the reward {self.names[key[0]]!r} {example}: missing for {missing[key]} "
            f"of {count}"
            for key, example in examples.items()
        )
        return Scores(self.names, by_name, total, is_missing, notes)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.close()
        self._threads.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _part(
        self, process: RewardProcess, reward: int, begin: int, arguments: Arguments
    ) -> _Part:
        """Score the completions of one call, and repeat it where it fails."""
        end = min(begin + CALL, len(arguments["completions"]))

        def call(first: int, last: int, seconds: float) -> Outcomes:
            chunk = {name: list(each[first:last]) for name, each in arguments.items()}
            return process.score(self._functions.index(reward), chunk, seconds)

        found = call(begin, end, self._time_limit)
        if not isinstance(found, str):
            return reward, list(enumerate(found, begin))
        if end - begin == 1:
            return reward, [(begin, found)]
        share = 2 * self._time_limit / (end - begin)
        again = [call(i, i + 1, share) for i in range(begin, end)]
        outcomes = [one if isinstance(one, str) else one[0] for one in again]
        return reward, [(-1, found), *enumerate(outcomes, begin)]


def _from_all_processes(parts: Sequence[_Part]) -> Sequence[_Part]:
    """The parts of all processes of JAX.

    As JSON, which has every bit of a float64; as arrays, JAX would round to float32.
    """
    import jax
    from jax.experimental.multihost_utils import process_allgather

    if jax.process_count() == 1:
        return parts
    content = np.frombuffer(json.dumps(parts).encode(), np.uint8)
    sizes = np.asarray(process_allgather(np.int32(content.size)))
    rows = np.asarray(process_allgather(np.resize(content, int(sizes.max()))))
    pairs = zip(sizes, rows, strict=True)
    return [part for size, row in pairs for part in json.loads(row[:size].tobytes())]
