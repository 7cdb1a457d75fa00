# SPDX-License-Identifier: Apache-2.0
"""Processor seconds of pipelines: Tessera beside SpectraX and JaxPP.

All compute loss and gradients of one residual MLP of eight equal layers in f32, from
the same weights and batch, on four simulated devices with eight microbatches; ``jax``
is plain JAX on one device, which adds up the gradients of as many microbatches. Each is
a process of its own, and they take their steps in turns. The processor's time is that
of all threads: simulated devices that wait take none. Loss and gradients stand beside
those of plain JAX for the whole batch. Temporaries are of one device, as XLA has
planned them; the peers, whose stages are programs of their own, do not tell theirs.

``--spectrax-python`` and ``--jaxpp-python`` name a Python that has spectrax-lib, and
one that has JaxPP; without them, Tessera is alone. JaxPP, which asks for CUDA, installs
without its dependencies, and needs CUDA for processes that send to one another alone:

    pip install jax==0.9.2 portpicker
    pip install --no-deps git+https://github.com/NVIDIA/jaxpp

    python benchmarks/peer_pipelines.py [--quick] [--json PATH]
        [--spectrax-python PATH] [--jaxpp-python PATH]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import report

FOLDER = Path(__file__).parent / "peer_programs"
sys.path.append(str(FOLDER))

from peer_process import PeerProcess  # noqa: E402
from pipeline_setting import CHUNKS, Setting, write_reference  # noqa: E402

POLICIES: Final = ("none", "full")
AGREE: Final = 1e-6  # loss and gradients, relative
STEPS: Final = 2  # of a turn


class Case:
    """A contestant's steps of one schedule, and what they took.

    Attributes:
      first: Processor seconds of the first call, which compiles.
      seconds: Those of each later step.
      apart: The largest relative distances of the loss and of a gradient.
    """

    def __init__(
        self, name: str, process: PeerProcess, schedule: str, remat: str
    ) -> None:
        self.name, self.schedule, self.remat = name, schedule, remat
        self._process = process
        self.seconds: list[float] = []
        self.apart = [0.0, 0.0]
        (self.first,) = self._ask(1)["seconds"]

    def run(self) -> None:
        """Take the steps of a turn."""
        self.seconds += self._ask(STEPS)["seconds"]

    def _ask(self, steps: int) -> Any:
        answer = self._process.ask([self.schedule, self.remat, steps])
        self.apart = [*map(max, self.apart, answer["apart"])]
        self.temporaries = answer["temporaries"]
        if max(self.apart) > AGREE:
            raise SystemExit(
                f"{self.name}, {self.schedule}: not what plain JAX computes: loss and "
                f"gradients are {self.apart} apart"
            )
        return answer

    def row(self, alone: float, version: str) -> report.Row:
        """A line of the table, beside the seconds of one device."""
        ratio = statistics.median(self.seconds) / alone
        found = self.temporaries
        return {
            "schedule": self.schedule,
            "contestant": self.name,
            "remat": self.remat,
            "processor, s a step": report.extremes(self.seconds, 3),
            "of one device": f"{ratio:.2f}",
            "first call, processor s": round(self.first, 1),
            "temporaries MB": "not exposed" if found is None else f"{found / 1e6:.1f}",
            "loss apart": f"{self.apart[0]:.1e}",
            "gradients apart": f"{self.apart[1]:.1e}",
            "with": version,
        }


def cases_of(processes: dict[str, PeerProcess], quick: bool) -> Iterator[Case]:
    """All of them, schedule by schedule, compiled."""
    yield Case("jax", processes["jax"], "one device", "none")
    for schedule in list(CHUNKS)[: 2 if quick else None]:
        for name, process in processes.items():
            policies = {"jax": (), "tessera": POLICIES}.get(name, ("its own",))
            for remat in policies:
                report.progress(f"{name} compiles {schedule}")
                yield Case(name, process, schedule, remat)


def rows_of(pythons: dict[str, str], rounds: int, quick: bool) -> list[report.Row]:
    """A line for each contestant and schedule."""
    processes: dict[str, PeerProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(f"{folder}/reference.npz")
        write_reference(setting)
        try:
            for name, python in pythons.items():
                processes[name] = process_of(name, python, setting)
            versions = {name: p.answer()["version"] for name, p in processes.items()}
            cases = list(cases_of(processes, quick))
            for number, case in enumerate(report.in_turns(cases, rounds)):
                if number % len(cases) == 0:
                    report.progress(f"round {number // len(cases) + 1}")
                case.run()
        finally:
            for process in processes.values():
                process.close()
    alone = statistics.median(cases[0].seconds)
    return [case.row(alone, versions[case.name]) for case in cases]


def process_of(name: str, python: str, setting: Setting) -> PeerProcess:
    """A contestant, which begins."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(setting.devices),
        # XLA's threads: as many as simulated devices, which wait for one another, need.
        "PJRT_NPROC": "32",
        "LOGGING_LEVEL_ED": "ERROR",  # of SpectraX
    }
    program = str(FOLDER / f"pipeline_{name}.py")
    command = [python, program, json.dumps(asdict(setting))]
    return PeerProcess(command, {**os.environ, **variables})


def main(options: argparse.Namespace) -> None:
    """Run the contestants and show the table."""
    pythons = {
        "jax": sys.executable,
        "tessera": sys.executable,
        "spectrax": options.spectrax_python,
        "jaxpp": options.jaxpp_python,
    }
    pythons = {name: python for name, python in pythons.items() if python}
    rounds = 2 if options.quick else options.rounds
    rows = rows_of(pythons, rounds, options.quick)
    sizes = asdict(Setting(""))
    del sizes["reference"]
    text = ", ".join(f"{name} {size}" for name, size in sizes.items())
    report.show(f"Pipelines of a residual MLP ({text})", rows, options.json)


def options_of() -> argparse.Namespace:
    """The arguments."""
    parser = report.parser(__doc__)
    parser.add_argument("--spectrax-python", help="a Python that has spectrax-lib")
    parser.add_argument("--jaxpp-python", help="a Python that has JaxPP")
    parser.add_argument("--rounds", type=int, default=5, help="of the turns of all")
    return parser.parse_args()


if __name__ == "__main__":
    main(options_of())
