# SPDX-License-Identifier: Apache-2.0
"""``timeline``: predicts when a compiled step computes and when it communicates.

Nothing runs: the times are those of the schedule that the compiler wrote, executed with
the figures of a target.
"""

from collections.abc import Mapping

from tessera.analysis import hlo
from tessera.analysis.collective import KINDS
from tessera.analysis.hlo import Computation, Instruction, Module
from tessera.analysis.hlo_walk import Node, cause
from tessera.analysis.ledger import HasText
from tessera.analysis.source_lines import user_line
from tessera.analysis.timeline.operation_times import OperationTimes
from tessera.analysis.timeline.schedule import TimedSteps
from tessera.analysis.timeline.simulation import Executed, Simulation
from tessera.analysis.timeline.timeline import Communication, Operation, Timeline
from tessera.analysis.timeline.transfers import COMPUTATION, COPY, HOST, Transfer
from tessera.errors import MeshShapeError, NoTargetError
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
    module = hlo.parse(text or "")
    if module.num_devices not in (1, mesh.size):
        raise MeshShapeError(
            "the timeline's mesh is not the one that the program was compiled for",
            got=f"{mesh.topology} = {mesh.size} devices, "
            f"a program for {module.num_devices}",
            fix="pass the mesh that the program was lowered on",
        )
    return _report(TimedSteps(module, mesh, mesh.target), module, mesh.target)


def _report(steps: TimedSteps, module: Module, target: Target) -> Timeline:
    run = Simulation(steps.steps)
    totals = run.totals
    transfers = {s.transfer.name: s.transfer for s in run.executed if s.transfer}
    spent: dict[tuple[str, ...], list[float]] = {}
    for name, transfer in transfers.items():
        if transfer.kind not in (COPY, COMPUTATION):
            sums = spent.setdefault(transfer.axes, [0.0, 0.0, 0.0])
            sums[0] += totals.transferred[name]
            sums[1] += totals.waited[name]
            sums[2] += totals.hidden[name]
    places = {
        name: computation
        for computation in module.computations.values()
        for name in computation.instructions
    }
    origins = (_origin(module, places, each) for each in run.executed)
    return Timeline(
        target=target.name,
        rule=_rule(module, target),
        seconds=run.now + target.machine.overhead["step"],
        computation=dict(totals.compute),
        communication={axes: Communication(*sums) for axes, sums in spent.items()},
        conditional=totals.conditional,
        unknown_loops=totals.unknown_loops,
        unknown_collectives=steps.unknown_collectives,
        operations=tuple(
            Operation(
                name=each.instruction.name,
                op_name=origin.op_name,
                source=user_line(module.frames(origin)),
                kind=each.kind,
                axes=each.transfer.axes if each.transfer else (),
                stream=_stream(target, each.transfer),
                each=each.each,
                times=each.times,
                exposed=totals.waited[each.instruction.name] if each.transfer else 0.0,
            )
            for each, origin in zip(run.executed, origins, strict=True)
        ),
    )


def _rule(module: Module, target: Target) -> str:
    if OperationTimes(module, target).clock_hz:
        rule = "the compiler's cycles of each operation"
    else:
        rule = "a roofline of each operation"
    rule += ", and the latency and bandwidth of links"
    if target.is_stand_in:
        rule += "; the program is compiled for the CPU, and not that of the target"
    return rule


def _stream(target: Target, transfer: Transfer | None) -> str:
    """What an operation or a transfer occupies."""
    if transfer is None:
        return "compute"
    if transfer.kind == COPY:
        return "copies to the host" if HOST in transfer.links else "copies"
    if transfer.kind == COMPUTATION:
        return "asynchronous"
    levels = target.machine.links
    if target.machine.is_torus:
        return f"{levels[0].name} {'×'.join(transfer.axes)}"
    return " + ".join(level.name for level in levels if level.name in transfer.links)


def _origin(
    module: Module, places: Mapping[str, Computation], drawn: Executed
) -> Instruction:
    """The instruction that has the user's line, such as a reader of what XLA inserted.

    Args:
      module: The program.
      places: The computation of each of its instructions.
      drawn: What it executes.
    """
    found = drawn.instruction
    if drawn.kind not in KINDS or module.frames(found):
        return found
    return cause(module, Node(((places[found.name], found),)))
