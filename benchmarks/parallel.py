# SPDX-License-Identifier: Apache-2.0
"""What each way of training in parallel holds, sends and takes.

For every mode of ``modes.py``: bytes of arguments and temporaries as XLA has planned
them, collectives of the compiled step by mesh axes and kind, step time. Some modes
stand beside the same step by hand: their times alternate in one run, a ratio is that
of the medians. Bytes are of one device in one step. Of pipelines there is more, from
``pipelines.py``: memory against the number of microbatches, idle time of the executed
tables, with --policies the CPU time of each policy of residuals beside one device, and
with --compile the time to compile.

Simulated devices share the cores of this machine, so a step time tells the work of all
devices together, and nothing of the time that links or idle devices would take.

    python benchmarks/parallel.py [--quick] [--modes A,B] [--compile] [--json PATH]
    python benchmarks/parallel.py --policies [--json PATH]
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tessera.dist import simulate_devices

simulate_devices(8)

import pipelines  # noqa: E402
import report  # noqa: E402
from modes import MODES  # noqa: E402
from runs import Prepared, prepared, random_batch  # noqa: E402

from tessera.analysis.collective import Total  # noqa: E402
from tessera.analysis.ledger import collectives  # noqa: E402
from tessera.analysis.memory import memory  # noqa: E402
from tessera.mesh import Mesh  # noqa: E402

QUICK = ("fsdp", "gpipe")
MICROBATCHES, ROWS, LENGTH = 8, 32, 64
ROUNDS, ROUNDS_ALONE, QUICK_ROUNDS = 40, 10, 4


@dataclass(frozen=True)
class Counts:
    """What is counted of one program, per device and step.

    Attributes:
      arguments: Bytes of the state and the batch.
      temporaries: Bytes that the step allocates and frees again.
      sent: Collectives by mesh axes and kind.
    """

    arguments: int
    temporaries: int
    sent: dict[tuple[tuple[str, ...], str], Total]

    @classmethod
    def of(cls, compiled: Any, mesh: Mesh) -> "Counts":
        """Of a program that JAX compiled for a mesh."""
        planned = memory(compiled)
        sent = collectives(compiled, mesh).totals()
        return cls(planned.arguments, planned.temporaries, sent)

    @property
    def calls(self) -> int:
        """Collectives that one device takes part in."""
        return sum(total.calls for total in self.sent.values())

    @property
    def nbytes(self) -> int:
        """Bytes of their arrays."""
        return sum(total.nbytes for total in self.sent.values())

    def rows(self, mode: str, whose: str) -> Iterator[report.Row]:
        """A row for each pair of axes and kind."""
        for (axes, kind), total in sorted(self.sent.items()):
            yield {
                "mode": mode,
                "program": whose,
                "axes": "×".join(axes),
                "collective": kind,
                "operations": total.operations,
                "calls": total.calls,
                "bytes": total.nbytes,
            }


def prepare(name: str) -> Prepared:
    """One mode, compiled."""
    mode = MODES[name]
    config = mode.step_config(MICROBATCHES)
    batch = random_batch(config, ROWS // config.accumulation, LENGTH)
    return prepared(config, batch, mode.by_hand)


def counted(name: str, both: Prepared) -> list[Counts]:
    """The counts of Tessera's program, and of the one by hand where there is one."""
    mesh = MODES[name].step_config(MICROBATCHES).mesh
    programs = [both.compiled.jax, both.twin]
    return [Counts.of(program, mesh) for program in programs if program is not None]


def timed(both: Prepared, rounds: int) -> list[list[float]]:
    """Seconds of each program's steps; the first ones do not count."""
    runs = both.runners()
    report.alternate(runs, 2)
    return report.alternate(runs, rounds)


def compared(name: str, counts: list[Counts], seconds: list[list[float]]) -> report.Row:
    """Tessera's program as a multiple of the one by hand."""
    ours, theirs = counts
    medians = [statistics.median(each) for each in seconds]
    return {
        "mode": name,
        "arguments": _ratio(ours.arguments, theirs.arguments),
        "temporaries": _ratio(ours.temporaries, theirs.temporaries),
        "calls": _ratio(ours.calls, theirs.calls),
        "bytes sent": _ratio(ours.nbytes, theirs.nbytes),
        "collectives": "equal" if ours.sent == theirs.sent else "differ",
        "by hand: arguments": theirs.arguments,
        "by hand: temporaries": theirs.temporaries,
        "Tessera ms": report.spread(seconds[0]),
        "by hand ms": report.spread(seconds[1]),
        "step time": _ratio(*medians),
    }


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.3f}"


def measure(names: list[str], rounds: int | None) -> dict[str, list[report.Row]]:
    """The three tables of some modes."""
    modes, ratios, sent = [], [], []
    for name in names:
        report.progress(name)
        both = prepare(name)
        counts = counted(name, both)
        alone = ROUNDS_ALONE if both.twin is None else ROUNDS
        seconds = timed(both, rounds or alone)
        modes.append(
            {
                "mode": name,
                "mesh": MODES[name].topology,
                "arguments": counts[0].arguments,
                "temporaries": counts[0].temporaries,
                "calls": counts[0].calls,
                "bytes sent": counts[0].nbytes,
                "step ms": report.spread(seconds[0]),
            }
        )
        for program, whose in zip(counts, ("Tessera", "by hand"), strict=False):
            sent.extend(program.rows(name, whose))
        if both.twin is not None:
            ratios.append(compared(name, counts, seconds))
    tables = {"Every mode, per device and step": modes}
    if ratios:
        tables["Tessera's step divided by the same step by hand"] = ratios
    return {**tables, "Collectives by mesh axes": sent}


def options_of() -> argparse.Namespace:
    """What the command line asks for."""
    parser = report.parser(__doc__)
    parser.add_argument("--modes", help=f"some of: {', '.join(MODES)}")
    parser.add_argument(
        "--compile", action="store_true", help="the time to compile, a few minutes more"
    )
    parser.add_argument(
        "--policies", action="store_true", help="policies of pipelines alone"
    )
    found = parser.parse_args()
    found.names = list(MODES)
    if found.quick:
        found.names = list(QUICK)
    if found.modes is not None:
        found.names = found.modes.split(",")
        if unknown := set(found.names) - set(MODES):
            parser.error(f"no mode {', '.join(sorted(unknown))} in {', '.join(MODES)}")
    return found


def main(options: argparse.Namespace) -> None:
    """Measure, and show what was asked for."""
    if options.policies:
        title = "CPU seconds of a step by policy of residuals"
        report.show(title, pipelines.policy_rows(), options.json)
        return
    tables = measure(options.names, QUICK_ROUNDS if options.quick else None)
    tables["Idle time of the executed tables"] = pipelines.idle_rows()
    if not options.quick and options.modes is None:
        tables["Temporary bytes by microbatches"] = pipelines.memory_rows()
    if options.compile:
        tables["CPU seconds to compile a step"] = pipelines.compile_rows()
    report.show_all(tables, options.json)


if __name__ == "__main__":
    main(options_of())
