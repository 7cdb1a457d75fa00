# SPDX-License-Identifier: Apache-2.0
"""How much of the time of collectives has computation beside it, as predicted.

    python benchmarks/overlap.py --machines h100 v5p

Gemma 3 1B in bf16, two sequences of 4,096 tokens a device, on ``fsdp`` of 8 and on
``fsdp`` of 8 with ``tp`` of 2, by the machine's own compiler: with the options that
Tessera gives it, and without (``schedule.all_reduce_overlap(False)``). A step takes
half a minute for H100, some minutes for TPUs.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import report
from compiled_step import by_tessera

from tessera.mesh import Mesh
from tessera.tracing import scope
from tessera.train.runtime.devices import prepare_devices

# For each machine the targets of 8 and of 16 devices.
TARGETS: Final = {
    "h100": ("h100:1x8", "h100:2x8"),
    "v5p": ("v5p:2x2x2", "v5p:2x2x4"),
}
MESHES: Final = ({"fsdp": 8}, {"fsdp": 8, "tp": 2})


def longest_wait(timeline: Any) -> str:
    """The collective that a step waits for longest, how long, and why."""
    if not timeline.waits:
        return "none"
    event = timeline.waits[0]
    op = event.op_name.removeprefix("jit(train_step)/")[-60:]
    words = f"{event.kind} {'×'.join(event.axes)} {op}: {event.reason}"
    return f"{1e3 * event.exposed:.2f} ms: {words}"


def rows(machines: list[str], policies: tuple[str, ...]) -> Iterator[report.Row]:
    for name in machines:
        for target, sizes in zip(TARGETS[name], MESHES, strict=True):
            mesh = Mesh(tuple(sizes), shape=tuple(sizes.values()), target=target)
            for policy in policies:
                for overlap in (False, None):
                    report.progress(f"{target}, {policy}, all_reduce_overlap={overlap}")
                    plan = replace(scope.current_plan(), all_reduce_overlap=overlap)
                    scope.set_plan(plan)
                    yield row(by_tessera(mesh, target, policy), target, policy)


def row(compiled: Any, target: str, policy: str) -> report.Row:
    found, graph = compiled.timeline, compiled.traced.graph
    return {
        "target": target,
        "mesh": graph.mesh.topology,
        "remat": policy,
        "options": "none" if graph.plan.all_reduce_overlap is False else "default",
        "overlap %": round(100 * found.overlap, 1),
        "exposed ms": round(1e3 * found.exposed, 2),
        "step ms": round(1e3 * found.seconds, 1),
        "temporaries GiB": round(compiled.memory.temporaries / 2**30, 2),
        "longest wait": longest_wait(found),
    }


def main() -> None:
    """Compile, predict, print a table."""
    parser = report.parser(__doc__)
    parser.add_argument("--machines", nargs="+", default=["h100"], choices=TARGETS)
    parser.add_argument("--remat", nargs="+", default=["named", "full"])
    options = parser.parse_args()
    prepare_devices(1, "cpu")
    policies = tuple(options.remat[:1] if options.quick else options.remat)
    title = "The share of the time of collectives that computation hides, predicted"
    report.show(title, list(rows(options.machines, policies)), options.json)


if __name__ == "__main__":
    main()
