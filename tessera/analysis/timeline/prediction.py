# SPDX-License-Identifier: Apache-2.0
"""``timeline``: predicts when a compiled step computes and when it communicates.

Nothing runs: the times are those of the schedule that the compiler wrote, executed with
the figures of a target.
"""

from tessera.analysis.hlo import Module
from tessera.analysis.ledger import HasText
from tessera.analysis.slice_programs import program_of
from tessera.analysis.source_lines import user_line
from tessera.analysis.timeline.operation_times import clock_hz
from tessera.analysis.timeline.schedule import (
    COPY,
    HOST,
    Compute,
    TimedSteps,
    Transfer,
)
from tessera.analysis.timeline.simulation import Executed, Simulation, Totals
from tessera.analysis.timeline.timeline import Communication, Operation, Timeline
from tessera.errors import NoTargetError
from tessera.mesh import Mesh
from tessera.targets.target import Target


def timeline(program: HasText | str, mesh: Mesh) -> Timeline:
    """Predict one execution of a compiled program on the target of its mesh.

    Args:
      program: A compiled program, or the text of its optimized and scheduled module.
      mesh: The mesh that it was compiled for, in the order of its devices, with a
        target: ``Mesh(["device"], devices=order, target="h100:2x8")`` where only the
        order of the devices is known.

    Raises:
      NoTargetError: [T713] the mesh has no target, so nothing says how fast it is.
      MeshShapeError: [T101] the program is for another number of devices.

    Example:
      >>> text = '''HloModule step, is_scheduled=true, num_partitions=8
      ... ENTRY main {
      ...   g = f32[1000000] parameter(0)
      ...   ROOT r = f32[1000000] all-reduce(g), replica_groups=[1,8]<=[8]
      ... }'''
      >>> found = timeline(text, Mesh(["dp"], target="h100:1x8"))
      >>> found.compute, round(found.exposed * 1e6, 1)
      (0, 43.4)
    """
    if mesh.target is None:
        raise NoTargetError(
            "a timeline needs the machine that the program is for",
            got=f"{mesh.topology} without a target",
            fix='make the mesh with one: dist.Mesh(axes, shape=…, target="h100:1x8")',
        )
    text = program if isinstance(program, str) else program.as_text()
    module = program_of(text or "", mesh)
    return _report(TimedSteps(module, mesh, mesh.target), module, mesh.target)


def _report(steps: TimedSteps, module: Module, target: Target) -> Timeline:
    run = Simulation(steps.steps)
    totals = run.totals
    axes = {
        each.work.name: each.work.row.axes
        for each in run.executed
        if isinstance(each.work, Transfer) and each.work.row
    }
    spent: dict[tuple[str, ...], list[float]] = {}
    for name, over in axes.items():
        sums = spent.setdefault(over, [0.0, 0.0, 0.0])
        sums[0] += totals.transferred[name]
        sums[1] += totals.waited[name]
        sums[2] += totals.hidden[name]
    return Timeline(
        target=target.name,
        rule=_rule(target),
        seconds=run.now + target.machine.overhead["step"],
        computation=dict(totals.compute),
        communication={over: Communication(*sums) for over, sums in spent.items()},
        conditional=totals.conditional,
        unknown_loops=totals.unknown_loops,
        unknown_collectives=steps.unknown_collectives,
        operations=tuple(
            _operation(module, target, totals, each) for each in run.executed
        ),
    )


def _operation(
    module: Module, target: Target, totals: Totals, executed: Executed
) -> Operation:
    work = executed.work
    is_transfer = isinstance(work, Transfer)
    row = work.row if is_transfer else None
    return Operation(
        name=work.instruction.name,
        op_name=row.op_name if row else work.instruction.op_name,
        source=row.source if row else user_line(module.frames(work.instruction)),
        kind=work.kind,
        axes=row.axes if row else (),
        stream=_stream(target, work),
        each=work.seconds,
        times=executed.times,
        exposed=totals.waited[work.name] if is_transfer else 0.0,
        reason=totals.reason(work) if is_transfer else "",
    )


def _rule(target: Target) -> str:
    counted = "the compiler's cycles" if clock_hz(target) else "a roofline"
    rule = f"{counted} of each operation, and the latency and bandwidth of links"
    if target.is_stand_in:
        rule += "; the program is compiled for the CPU, and not that of the target"
    return rule


def _stream(target: Target, work: Compute | Transfer) -> str:
    """What an operation or a transfer occupies."""
    if isinstance(work, Compute):
        return "compute"
    if work.kind == COPY:
        return "copies to the host" if HOST in work.links else "copies"
    if work.row is None:
        return "asynchronous"
    levels = target.machine.links
    names = " + ".join(level.name for level in levels if level.name in work.links)
    if target.machine.is_torus:  # whose links inside of a slice have no name
        return f"{names or levels[0].name} {'×'.join(work.row.axes)}"
    return names
