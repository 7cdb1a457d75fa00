# SPDX-License-Identifier: Apache-2.0
"""Whether Tessera's step is the program of the same step by hand.

For each way of training that ``by_hand`` has: without the passes that change a program
for its backend, the optimised program as canonical text beside that of the step by
hand; then what those passes change, by their own account and in the optimised program.
Names of modules and computations and source lines are left out; constants, layouts,
donation, fusions and the order in which operations run are not. Counts of operations
are of the three programs: without passes, by hand, with passes.

    python benchmarks/program_identity.py [--quick] [--json PATH] [--operations]
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tessera.dist import simulate_devices

simulate_devices(8)

import by_hand  # noqa: E402
import jax  # noqa: E402
import report  # noqa: E402
from canonical import canonical, differing, operations  # noqa: E402
from modes import MODES  # noqa: E402
from overhead import MESHES, config_on  # noqa: E402
from runs import random_batch  # noqa: E402

from tessera.graph.function import Function  # noqa: E402
from tessera.graph.pass_runner import BACKEND_PASSES  # noqa: E402
from tessera.train.config.step_config import StepConfig  # noqa: E402
from tessera.train.loop.step import make_train_step  # noqa: E402
from tessera.train.loop.train_state import init_state  # noqa: E402

NAMES = (*MESHES, "gpipe")
ROWS, LENGTH, MICROBATCHES = 16, 64, 8
SHOWN = (
    "dot",
    "collective-permute",
    "all-reduce",
    "all-gather",
    "while",
    "conditional",
)


def config_named(name: str) -> StepConfig:
    """The trainer's, on the mesh of that name."""
    if name == "gpipe":
        return MODES[name].step_config(MICROBATCHES, depth=1)
    return config_on(*MESHES[name])


def steps(name: str) -> tuple[Function, Function, Any, Any]:
    """Tessera's step without and with backend passes, that by hand; their arguments."""
    config = config_named(name)
    state = init_state(config.model, config.optimizer, jax.random.key(0), config.mesh)
    batch = random_batch(config, ROWS, LENGTH)
    full = make_train_step(config, state)
    plain = Function(full.body, full.options, skip_passes=BACKEND_PASSES)
    twin = by_hand.gpipe if name == "gpipe" else by_hand.sharded
    return plain, full, twin(config), (state, batch)


def compared(name: str, tables: dict[str, list[report.Row]]) -> report.Row:
    """The line of one way of training; operations that differ become tables."""
    plain, step, by_hand_step, arguments = steps(name)
    full = step.compile(*arguments)
    compiled = (
        plain.compile(*arguments).jax,
        by_hand_step.lower(*arguments).compile(),
        full.jax,
    )
    texts = [canonical(each) for each in compiled]
    apart = differing(texts[0], texts[1])
    if apart:
        tables[f"{name}: operations without passes, and by hand"] = rows_of(apart)
    by_passes = differing(texts[2], texts[0])
    changes = {
        each: sum(
            line.startswith(("+ ", "- ")) for line in full.traced.diff(each).split("\n")
        )
        for each in BACKEND_PASSES
    }
    if by_passes:
        tables[f"{name}: operations with passes, and without"] = rows_of(by_passes)
    return {
        "step": name,
        "operations": operations(texts[0]).total(),
        "by hand": operations(texts[1]).total(),
        "is": "the same program" if texts[0] == texts[1] else _differs(apart),
        "lines that passes changed": ", ".join(f"{k} {v}" for k, v in changes.items()),
        "operations that passes changed": sum(
            abs(ours - before) for ours, before in by_passes.values()
        ),
        **_kinds(texts),
    }


def rows_of(apart: Mapping[str, tuple[int, int]]) -> list[report.Row]:
    """A line for each operation that is not as often in both."""
    return [
        {"operation": name, "here": ours, "there": theirs}
        for name, (ours, theirs) in apart.items()
    ]


def _differs(apart: Mapping[str, tuple[int, int]]) -> str:
    if not apart:
        return "the same operations in another order"
    return f"another: {sum(abs(a - b) for a, b in apart.values())} operations"


def _kinds(texts: list[str]) -> dict[str, str]:
    """How often the main operations are in all three programs."""
    counts = []
    for text in texts:
        kinds = Counter[str]()
        for operation, times in operations(text).items():
            kinds[operation.split(" ")[0]] += times
        counts.append(kinds)
    return {kind: " ".join(str(each[kind]) for each in counts) for kind in SHOWN}


def main(options: argparse.Namespace) -> None:
    """Compare on every mesh and show what differs."""
    tables: dict[str, list[report.Row]] = {}
    names = ("one device", "fsdp×tp") if options.quick else NAMES
    rows = []
    for name in names:
        report.progress(name)
        rows.append(compared(name, tables))
    title = "Programs without passes, by hand and with passes"
    if not options.operations:
        report.show(title, rows, options.json)
    else:
        report.show_all({title: rows, **tables}, options.json)


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.add_argument(
        "--operations", action="store_true", help="list those that differ"
    )
    main(parser.parse_args())
