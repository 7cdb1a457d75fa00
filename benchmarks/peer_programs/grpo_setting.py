# SPDX-License-Identifier: Apache-2.0
"""What both contestants of ``reward_tuning.py`` train on, and how they take turns."""

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

CONTESTANTS: Final = ("tessera", "tunix")
# Of a step: what completions take, their rewards, and what is learned of them.
PHASES: Final = ("rollout", "reward", "step")
# Of the bytes tokenizer: begins each prompt, and ends a completion.
SEPARATOR: Final = 256
# Not a byte, and never in a prompt.
PADDING: Final = 257
# Both say how probable it is under the first weights.
TEXT: Final = b"what is 1+2?"


@dataclass(frozen=True)
class Setting:
    """A run, of which every contestant does the same.

    Attributes:
      folder: Has ``model``, the folder of Hugging Face's form that the run begins
        with, and ``prompts.jsonl``; contestants write what they log there.
      steps: More than the optimizer steps that are asked for.
      mesh: Devices along ``fsdp`` and ``tp``.
      prompts: Of a step.
      group: Completions of each prompt.
      prompt_tokens: The most tokens of a prompt.
      completion_tokens: The most tokens of a completion.
      learning_rate: Of AdamW without decay, the same in all steps.
    """

    folder: str
    steps: int
    mesh: tuple[int, int] = (1, 1)
    prompts: int = 4
    group: int = 8
    prompt_tokens: int = 16
    completion_tokens: int = 16
    learning_rate: float = 1e-3

    @property
    def model(self) -> str:
        """The folder of the first weights."""
        return f"{self.folder}/model"

    @property
    def data(self) -> str:
        """The prompts."""
        return f"{self.folder}/prompts.jsonl"

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group


def write_prompts(path: Path, count: int = 400) -> None:
    """Sums of two numbers, in words before and after: 9 to 14 bytes."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            text = f"what is {draw.randrange(100)}+{draw.randrange(100)}?"[-14:]
            file.write(json.dumps({"prompt": text}) + "\n")


def digits(
    prompts: Sequence[str], completions: Sequence[str], **columns: Any
) -> list[float]:
    """The reward: the share of a completion's characters that are digits."""
    del prompts, columns
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def processor_seconds() -> float:
    """Of this process, all of its threads, and its children."""
    return time.process_time() + _of_children() / os.sysconf("SC_CLK_TCK")


def _of_children() -> int:
    """Ticks of the clock that children have used."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ends meanwhile
            for child in (task / "children").read_text().split():
                # After the name, which may have spaces.
                after = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2]
                ticks += sum(map(int, after.split()[11:13]))
    return ticks


class Turns:
    """Lets a run go on for as many steps as its parent asks for.

    Args:
      out: Where to answer; what libraries print must go elsewhere.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._left = out, 0
        self._begin = self._used = 0.0
        self._noted: dict[str, list[float]] = {}

    def note(self, **numbers: float) -> None:
        """Numbers of a step, which the answer has."""
        for name, number in numbers.items():
            self._noted.setdefault(name, []).append(number)

    def answer(self, values: Any) -> None:
        """Write a line."""
        print(json.dumps(values), file=self._out, flush=True)

    def begin_step(self) -> None:
        """Before each step: answer where the last of a turn is done, and wait.

        All computation that was begun must have ended.
        """
        if self._left == 0:
            if self._begin:
                processor = processor_seconds() - self._used
                wall = time.perf_counter() - self._begin
                self.answer({"wall": wall, "processor": processor, **self._noted})
                self._noted = {}
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self._left = int(line)
            self._used, self._begin = processor_seconds(), time.perf_counter()
        self._left -= 1


class Phases:
    """Notes the processor's seconds of each phase of a step.

    Args:
      turns: Where.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns, self._phase, self._begin = turns, "", 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before it ends; a rollout begins a step.

        Args:
          phase: One of ``PHASES``, or another, which is not noted.
        """
        now = processor_seconds()
        if self._phase in PHASES:
            self._seconds[self._phase] += now - self._begin
        if phase == PHASES[0]:
            if self._phase:
                self._turns.note(
                    **{f"{n} seconds": s for n, s in self._seconds.items()}
                )
            self._seconds = dict.fromkeys(PHASES, 0.0)
            self._turns.begin_step()
            now = processor_seconds()
        self._phase, self._begin = phase, now
