# SPDX-License-Identifier: Apache-2.0
"""``Rollout``: completions as the rows that the steps after a rollout learn from."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.foundations.labels import IGNORE_INDEX
from tessera.train.objectives.policy_losses import advantages, token_weights
from tessera.train.rollouts.trajectories import Trajectory

_INTEGERS: Final = ("tokens", "targets", "segment_ids", "positions")


@dataclass(frozen=True)
class Rollout:
    """Rows ``[N, S]`` on the host, the same in every process.

    Attributes:
      arrays: int32 and f32, by the names that ``Policy`` gives them; the completions of
        a prompt are neighbors.
      form: What decided the numbers, see ``Run.rollout_form``.
      used: Rows that steps have taken, over all passes.
    """

    arrays: Mapping[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]]
    form: str = ""
    used: int = 0

    @property
    def rows(self) -> int:
        """N."""
        return len(self.arrays["tokens"])

    def take(self, count: int) -> tuple[dict[str, np.ndarray], "Rollout"]:
        """The next ``count`` rows, which N is a multiple of, and the rollout after."""
        begin = self.used % self.rows
        rows = {
            name: array[begin : begin + count] for name, array in self.arrays.items()
        }
        return rows, replace(self, used=self.used + count)

    def write(self, path: Path) -> None:
        """Write it to a file.

        Raises:
          OSError: It cannot be written.
        """
        with path.open("wb") as file:
            arrays: Any = {"form": np.str_(self.form), **self.arrays}
            np.savez(file, used=np.int64(self.used), **arrays)

    @classmethod
    def read(cls, path: Path) -> "Rollout":
        """What ``write`` wrote.

        Raises:
          OSError: It cannot be read.
          ValueError: It is no such file.
        """
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        form, used = str(arrays.pop("form")), int(arrays.pop("used"))
        return cls(arrays, form, used)


def rows_of(
    prompts: Sequence[npt.NDArray[np.int32]],
    trajectories: Sequence[Trajectory],
    length: int,
) -> dict[str, np.ndarray]:
    """Prompts and what follows them as rows, without advantages and weights.

    Args:
      prompts: The tokens of each prompt.
      trajectories: Of each prompt.
      length: S; a prompt and what follows have at most S + 1 tokens.
    """
    count = len(prompts)
    rows: dict[str, np.ndarray] = {
        name: np.zeros((count, length), np.int32) for name in _INTEGERS
    }
    rows["targets"][:] = IGNORE_INDEX
    rows["sampled"] = np.zeros((count, length), np.float32)
    for row, (prompt, after) in enumerate(zip(prompts, trajectories, strict=True)):
        ids = np.concatenate([prompt, after.tokens])
        size, begin = len(ids) - 1, len(prompt) - 1
        rows["tokens"][row, :size] = ids[:-1]
        rows["segment_ids"][row, :size] = 1
        rows["positions"][row, :size] = np.arange(size)
        own = np.flatnonzero(after.is_own)
        rows["targets"][row, begin + own] = after.tokens[own]
        rows["sampled"][row, begin + own] = after.log_probs[own]
    return rows


def learned_rows(
    rows: dict[str, np.ndarray],
    algorithm: str,
    rewards: npt.NDArray[np.float64],
    is_missing: npt.NDArray[np.bool_],
    is_masked: npt.NDArray[np.bool_],
    *,
    group_size: int,
    max_tokens: int,
    rows_per_step: int,
) -> dict[str, np.ndarray]:
    """Rows with what their rewards say of them.

    Args:
      rows: As from ``rows_of``.
      algorithm: Of the loss.
      rewards: ``[N]``, in groups of neighbors.
      is_missing: ``[N]``, where there is none.
      is_masked: ``[N]``, of which completions nothing is learned.
      group_size: Completions of a prompt.
      max_tokens: The most tokens of a completion.
      rows_per_step: How many rows a step takes; among them a token is weighed.
    """
    groups = (-1, group_size)
    gains = advantages(
        algorithm, rewards.reshape(groups), is_missing.reshape(groups)
    ).reshape(-1)
    lengths = (rows["targets"] != IGNORE_INDEX).sum(axis=1)
    learned = ~(is_missing | is_masked)
    weights = [
        token_weights(algorithm, lengths[part], learned[part], max_tokens)
        for part in np.split(np.arange(len(lengths)), len(lengths) // rows_per_step)
    ]
    shape = rows["targets"].shape

    def of_tokens(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        return np.broadcast_to(values[:, None], shape).astype(np.float32)

    weight = of_tokens(np.concatenate(weights))
    return {**rows, "advantages": of_tokens(gains), "weights": weight}
