# SPDX-License-Identifier: Apache-2.0
"""Processor seconds of a step of GRPO: the trainer beside Tunix.

Both train one model of the sizes of ``model=tiny`` in f32, from the same weights: 4
prompts a step, 8 completions of each of at most 16 tokens, sampled at temperature 1, a
reward in Python (the share of digits), token-level GRPO without a reference model,
AdamW with clipped gradients, metrics for TensorBoard. Each is a process of its own, and
they take their steps in turns, on one device and on simulated ones. The processor's
time is that of all threads and of child processes: sampling, rewards, the step, and
what is written.

``--tunix-python`` names a Python that has google-tunix; without it, Tessera is alone.

    python benchmarks/reward_tuning.py [--quick] [--tunix-python PATH] [--json PATH]
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any, Final

import jax
import report

from tessera.train.models import DecoderModel, config_of, save_pretrained

FOLDER = Path(__file__).parent / "peer_programs"
sys.path.append(str(FOLDER))

from grpo_setting import CONTESTANTS, PHASES, Setting, write_prompts  # noqa: E402
from peer_process import PeerProcess  # noqa: E402

MESHES: Final = {"one device": (1, 1), "fsdp 2 × tp 2": (2, 2)}
WARM_UP: Final = 4  # steps, which compile
AGREE: Final = 1e-3  # of the log-probability of a text, in nats
# XLA's threads: as many as simulated devices, which wait for one another, need.
THREADS: Final = {"PJRT_NPROC": "32"}


class Contestant(PeerProcess):
    """A process that takes steps when it is asked to, and what they took.

    Attributes:
      wall: Seconds of a step, one number for each turn.
      processor: The same of the processor.
      first: Processor seconds of the first steps, which compile.
      rewards: The mean reward of each step.
      lengths: The mean tokens of a completion, of each step.
      phases: Processor seconds of each step by phase.
    """

    def __init__(self, name: str, python: str, setting: Setting) -> None:
        self.name, self.first = name, 0.0
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.rewards: list[float] = []
        self.lengths: list[float] = []
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        devices = str(prod(setting.mesh))
        program = FOLDER / f"grpo_{name}.py"
        super().__init__(
            [python, str(program), json.dumps(asdict(setting))],
            {**os.environ, **THREADS, "JAX_NUM_CPU_DEVICES": devices},
        )
        self.about = self.answer()

    def run(self, steps: int, *, counts: bool = True) -> None:
        """Take steps; the first ones compile, and do not count."""
        answer = self.ask(steps)
        self.rewards += answer["reward"]
        self.lengths += answer["length"]
        if counts:
            for phase in PHASES:
                self.phases[phase] += answer[f"{phase} seconds"]
            self.wall.append(answer["wall"] / steps)
            self.processor.append(answer["processor"] / steps)
        else:
            self.first = answer["processor"]


def measured(
    pythons: dict[str, str], setting: Setting, rounds: int, steps: int
) -> list[Contestant]:
    """The contestants, after as many turns of so many steps each."""
    found = []
    try:
        for name, python in pythons.items():
            report.progress(f"{name} compiles")
            found.append(Contestant(name, python, setting))
            found[-1].run(WARM_UP, counts=False)
        for contestant in report.in_turns(found, rounds):
            report.progress(f"{steps} steps of {contestant.name}")
            contestant.run(steps)
    finally:
        for contestant in found:
            contestant.close()
    texts = [contestant.about["log_prob"] for contestant in found]
    if max(texts) - min(texts) > AGREE:
        raise SystemExit(f"they do not begin with the same model: {texts}")
    return found


def row_of(where: str, one: Contestant, other: Contestant, setting: Setting) -> Any:
    """A line of the table, beside another contestant."""
    pairs = zip(one.processor, other.processor, strict=True)
    ratios = [own / theirs for own, theirs in pairs]
    curve = [one.rewards[0], *(one.rewards[i] for i in (4, 9, 14, -1))]
    return {
        "mesh": where,
        "contestant": one.name,
        "processor, s a step": report.extremes(one.processor, 3),
        f"of {other.name}": report.extremes(ratios, 3),
        "wall, s a step": report.extremes(one.wall, 3),
        "first steps, processor s": round(one.first, 1),
        "of which rollout, reward, step": ", ".join(
            f"{mean(seconds):.3f}" for seconds in one.phases.values()
        ),
        "tokens sampled a step": round(mean(one.lengths) * setting.rows),
        "reward at step 1, 5, 10, 15, last": " ".join(f"{x:.2f}" for x in curve),
        "with": f"{one.about['version']}, jax {one.about['jax']}",
    }


def main(options: argparse.Namespace) -> None:
    """Run the contestants on each mesh and show the table."""
    pythons = dict(
        zip(CONTESTANTS, (sys.executable, options.tunix_python), strict=True)
    )
    pythons = {name: python for name, python in pythons.items() if python}
    rounds, steps = (3, 4) if options.quick else (options.rounds, options.steps)
    model, rows = DecoderModel(config_of("tiny")), []
    for where, mesh in MESHES.items():
        if options.quick and mesh != (1, 1):
            continue
        with tempfile.TemporaryDirectory() as folder:
            # More steps than are asked for: neither ends by itself.
            setting = Setting(folder, WARM_UP + rounds * steps + 100, mesh)
            save_pretrained(model.init(jax.random.key(0)), setting.model, model=model)
            write_prompts(Path(setting.data))
            found = measured(pythons, setting, rounds, steps)
        rows += [row_of(where, each, found[-1], setting) for each in found]
        report.progress(f"{where}: {rows[-len(found) :]}")
    sizes = f"{setting.prompts} prompts × {setting.group} completions a step"
    report.show(f"GRPO of tiny, {sizes}, f32", rows, options.json)


def options_of() -> argparse.Namespace:
    """The arguments."""
    parser = report.parser(__doc__)
    parser.add_argument("--tunix-python", help="a Python that has google-tunix")
    parser.add_argument("--rounds", type=int, default=5, help="of the turns of both")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    return parser.parse_args()


if __name__ == "__main__":
    main(options_of())
