# SPDX-License-Identifier: Apache-2.0
"""``timeline``: predicts when a compiled step computes and when it communicates.

Nothing runs: the times are those of the schedule that the compiler wrote, executed with
the figures of a target.
"""

from collections.abc import Sequence

from tessera.analysis import hlo
from tessera.analysis.collective import KINDS
from tessera.analysis.hlo import Instruction, Module
from tessera.analysis.hlo_walk import Node, cause
from tessera.analysis.ledger import HasText
from tessera.analysis.source_lines import user_line
from tessera.analysis.timeline.event import COMPUTE, Event
from tessera.analysis.timeline.operation_times import OperationTimes
from tessera.analysis.timeline.report import Communication, Timeline
from tessera.analysis.timeline.schedule import TimedSteps
from tessera.analysis.timeline.simulation import Simulation, Slice, Totals
from tessera.analysis.timeline.transfers import COMPUTATION, COPY, HOST, Transfer
from tessera.errors import MeshShapeError, NoTargetError
from tessera.mesh import Mesh
from tessera.targets.link_routes import UsedLink
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


def _report(schedule: TimedSteps, module: Module, target: Target) -> Timeline:
    run = Simulation(schedule.steps)
    totals = run.totals
    transfers = {s.transfer.name: s.transfer for s in run.slices if s.transfer}
    communication: dict[tuple[str, ...], Communication] = {}
    for name, transfer in transfers.items():
        if transfer.kind not in (COPY, COMPUTATION):
            before = communication.get(transfer.axes, Communication(0.0, 0.0, 0.0))
            communication[transfer.axes] = Communication(
                before.seconds + totals.transferred[name],
                before.exposed + totals.waited[name],
                before.hidden + totals.hidden[name],
            )
    labels = _labels(target, list(transfers.values()))
    sources = _Sources(module)
    return Timeline(
        target=target.name,
        rule=_rule(module, target),
        seconds=run.now + target.machine.overhead["step"],
        computation=dict(totals.compute),
        communication=communication,
        conditional=totals.conditional,
        unknown_loops=totals.unknown_loops,
        events=tuple(_event(sources, each, labels, totals) for each in run.slices),
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


def _labels(target: Target, transfers: Sequence[Transfer]) -> dict[object, str]:
    """A name for all transfers that use the same links."""
    labels: dict[object, str] = {}
    taken: dict[str, int] = {}
    for transfer in transfers:
        if transfer.links in labels:
            continue
        label = _label(target, transfer)
        taken[label] = taken.get(label, 0) + 1
        number = taken[label]
        labels[transfer.links] = f"{label} ({number})" if number > 1 else label
    return labels


def _label(target: Target, transfer: Transfer) -> str:
    if transfer.kind == COPY:
        return "copies to the host" if HOST in transfer.links else "copies"
    if transfer.kind == COMPUTATION:
        return "asynchronous"
    links: frozenset[UsedLink] = transfer.links
    levels = target.machine.links
    if target.machine.is_torus:
        return f"{levels[0].name} {'×'.join(transfer.axes)}"
    return " + ".join(level.name for level in levels if level.name in links)


class _Sources:
    """Finds the user's line of an instruction.

    Args:
      module: The program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._places = {
            name: computation
            for computation in module.computations.values()
            for name in computation.instructions
        }

    def origin(self, instruction: Instruction, kind: str) -> Instruction:
        """The instruction that has the line, such as a reader of what XLA inserted."""
        if kind in KINDS and not self._module.frames(instruction):
            place = self._places[instruction.name]
            return cause(self._module, Node(((place, instruction),)))
        return instruction

    def line(self, instruction: Instruction) -> str:
        """``file:line``, or ``""``."""
        return user_line(self._module.frames(instruction))


def _event(
    sources: _Sources, drawn: Slice, labels: dict[object, str], totals: Totals
) -> Event:
    transfer = drawn.transfer
    origin, name = sources.origin(drawn.instruction, drawn.kind), drawn.instruction.name
    return Event(
        name=name,
        op_name=origin.op_name,
        source=sources.line(origin),
        kind=drawn.kind,
        axes=transfer.axes if transfer else (),
        stream=labels[transfer.links] if transfer else COMPUTE,
        start=drawn.start,
        duration=drawn.duration,
        each=drawn.each,
        times=drawn.times,
        exposed=totals.waited[name] if transfer else 0.0,
        hidden=totals.hidden[name] if transfer else 0.0,
    )
