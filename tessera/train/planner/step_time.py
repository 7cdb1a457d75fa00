# SPDX-License-Identifier: Apache-2.0
"""``StepModel``: predicts the time of a training step in a layout, without compiling.

The time of a step is that of its computation on one device, of the communication that
nothing hides, of the waiting of pipeline stages for each other, and of what starts
operations and steps. Each is the work of ``DeviceWork`` and ``StepCollectives`` at the
rates of the target, whose file has the source of every figure.
"""

import math
import sys
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import takewhile
from typing import Any

import numpy as np

from tessera.errors import PlanError
from tessera.targets.device_layout import device_grid
from tessera.targets.link_routes import domain
from tessera.targets.link_times import Span, collective_seconds, span
from tessera.targets.machine import HOST_BANDWIDTH
from tessera.targets.target import Target
from tessera.train.config.layout_checks import build_model
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.post_training_config import NEXT_TOKEN
from tessera.train.config.run_config import Config
from tessera.train.models.model import Model
from tessera.train.models.pipeline_stages import StageSplit
from tessera.train.planner.communication import Calls, StepCollectives
from tessera.train.planner.device_work import DeviceWork, PassSeconds
from tessera.train.planner.layout import Layout
from tessera.train.planner.lockstep import IN_RUNS, Lockstep
from tessera.train.planner.memory_model import MemoryEstimate, memory_of
from tessera.train.planner.phases import Phases
from tessera.train.planner.search_space import REMAT
from tessera.train.planner.workload import Workload, workload


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step in a layout: where its time goes, and its memory.

    Attributes:
      compute: Seconds of matmuls, attention and memory traffic on one device.
      exposed: Seconds of communication that nothing hides.
      bubble: Seconds in which stages of a pipeline wait for each other.
      overhead: Seconds of launching operations and steps.
      memory_bytes: The most memory of one device at any time.
      flops: Model FLOPs of the step, all devices together, without recomputation.
      phases: Seconds of what a run computes beside the step, by name; see ``Phases``.
    """

    compute: float
    exposed: float
    bubble: float
    overhead: float
    memory_bytes: int
    flops: float
    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of one step, with what is computed beside it."""
        step = self.compute + self.exposed + self.bubble + self.overhead
        return step + sum(self.phases.values())


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step, whatever ``dp`` and ``fsdp`` send.

    Attributes:
      whole: That all stages of a pipeline compute, together.
      busy: Of a step in which nothing is sent over these axes, nor added up over
        microbatches, or less.
    """

    whole: float
    busy: float


class StepModel:
    """Predicts steps of one run on one target.

    Args:
      config: The settings of the run; their layout does not matter.
      work: What a sequence costs.
      target: The machine.
    """

    def __init__(self, config: Config, work: Workload, target: Target) -> None:
        self.config, self.work, self.target = config, work, target
        self._on_sizes = cache(self._device_work)
        self._span_of = cache(self._span)
        self._seconds_of = cache(partial(collective_seconds, target.machine))
        self._lockstep_of = cache(Lockstep.of)
        self._computed = dict[Hashable, PassSeconds]()
        self._paces = dict[Hashable, Pace]()
        self.shares_of = cache(_shares)
        self._grid_of = cache(partial(device_grid, target))

    @classmethod
    def of(cls, config: Config, target: Target) -> "StepModel":
        """Trace the loss of a run, and its gradient for each policy: some seconds.

        Args:
          config: The settings of the run.
          target: The machine.

        Raises:
          PlanError: [T714] numerics are deterministic, of which nothing is predicted.
        """
        if config.training.numerics == "deterministic":
            raise PlanError(
                "the planner predicts steps with fast numerics alone",
                got="training.numerics=deterministic",
                fix="name the layout (model.mesh_shape, training.remat), or use "
                "training.numerics=fast",
            )
        remat = config.training.remat
        policies = REMAT if remat in REMAT else (*REMAT, remat)
        return cls(config, workload(config, target, policies), target)

    def predict(
        self, layout: Layout, memory: MemoryEstimate | None = None
    ) -> Prediction:
        """What a step takes, and where.

        Args:
          layout: A legal one: nothing is checked here.
          memory: Of this layout, where it is known.
        """
        return _Prediction(self, layout).prediction(memory or self.memory(layout))

    def least_seconds(self, layout: Layout, pace: Pace) -> float:
        """What no layout with this mesh, ZeRO stage and ``gather`` is faster than.

        As if a step had one microbatch, which sends least.

        Args:
          layout: A legal one, with the policy that computes least again.
          pace: At most that of any such layout.
        """
        share = layout.micro_batch_size * layout.microbatches
        as_one = replace(layout, micro_batch_size=share, microbatches=1)
        return _Prediction(self, as_one).least_seconds(pace)

    def pace(self, layout: Layout) -> Pace:
        """The pace of a layout, found once for all of a group.

        Args:
          layout: A legal one.
        """
        batch = layout.micro_batch_size, layout.microbatches
        stages = layout.schedule, layout.chunks, layout.sequence_parallel
        read = self.group(layout), batch, stages, str(layout.remat)
        if read not in self._paces:
            self._paces[read] = _Prediction(self, layout).pace()
        return self._paces[read]

    def group(self, layout: Layout) -> Hashable:
        """What ``pace`` reads of a mesh, with ``dp`` and ``fsdp`` as one."""
        others = tuple(axis for axis in layout.mesh if axis[0] not in ("dp", "fsdp"))
        spans = tuple(self._span_of(layout.mesh, (name,)) for name, _ in others)
        device, _ = self.device_work(layout)
        return others, spans, device.compute_key

    def lockstep(self, layout: Layout) -> Lockstep:
        """The ticks of a layout with a pipeline."""
        stages, chunks = layout.sizes["pp"], layout.chunks
        return self._lockstep_of(layout.schedule, stages, layout.microbatches, chunks)

    def memory(self, layout: Layout) -> MemoryEstimate:
        """The memory of one device, by what takes it."""
        device, _ = self.device_work(layout)
        found = memory_of(device, layout)
        if self.config.training.objective == NEXT_TOKEN:
            return found
        phases = self.phases(layout)
        copy = found.parameters if phases.has_copy else 0.0
        return replace(found, reference=copy, rollout=phases.rollout_bytes())

    def phases(self, layout: Layout) -> Phases:
        """What a run computes beside its steps."""
        device, model = self.device_work(layout)
        return Phases(self.config, StepCollectives(device, layout), model)

    def spans(self, mesh: tuple[tuple[str, int], ...]) -> frozenset[Any]:
        """How each axis of a mesh lies on the links."""
        return frozenset((name, self._span_of(mesh, (name,))) for name, _ in mesh)

    def device_work(self, layout: Layout) -> tuple[DeviceWork, Model]:
        """The part of the work that one device of a layout has."""
        sizes = tuple(sorted(layout.mesh))
        return self._on_sizes(sizes, layout.chunks, layout.sequence_parallel)

    def _device_work(
        self, mesh: tuple[tuple[str, int], ...], chunks: int, sequence: bool
    ) -> tuple[DeviceWork, Model]:
        layout = Layout(mesh, 1, 1, chunks=chunks, sequence_parallel=sequence)
        placed = mesh_of_shape([[s for _, s in mesh], [n for n, _ in mesh]])
        model = build_model(layout.applied(self.config), placed)
        place = model.place(placed)
        return DeviceWork(self.work, place, self.target.machine, model.split), model

    def compute(self, layout: Layout) -> PassSeconds:
        """Seconds of a microbatch, however the layers are cut into stages."""
        device, _ = self.device_work(layout)
        of = layout.micro_batch_size, str(layout.remat)
        read = *of, device.compute_key
        if read not in self._computed:
            self._computed[read] = device.compute(*of)
        return self._computed[read]

    def seconds(self, layout: Layout, calls: Calls) -> float:
        """Of all calls of a collective."""
        where = self._span_of(layout.mesh, calls.axes)
        return calls.times * self._seconds_of(calls.kind, calls.nbytes, where)

    def _span(self, mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> Span:
        sizes = tuple(size for _, size in mesh)
        place = tuple(slice(None) if name in axes else 0 for name, _ in mesh)
        if self.target.machine.is_torus:
            ids = np.reshape(self._grid_of(sizes), sizes)
            return span(self.target, [int(each) for each in np.ravel(ids[place])])
        # In row-major order the domain of its first device has the most of a group.
        group = np.arange(math.prod(sizes)).reshape(sizes)[place].flat
        inside = takewhile(lambda each: not domain(self.target, int(each)), group)
        return Span(len(group), len([*inside]))


def _shares(
    split: StageSplit | None, stages: int, costs: tuple[float, ...]
) -> tuple[float, ...]:
    if split is None:
        return (1.0 / stages,) * stages
    shares = np.zeros(stages)
    for stage, layers in enumerate(split.layers):
        shares[stage % stages] += sum(costs[layer] for layer in layers)
    return tuple(map(float, shares / sum(costs)))


class _Prediction:
    """One layout's prediction in the making."""

    def __init__(self, model: StepModel, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.machine = model.target.machine
        self.device, self.built = model.device_work(layout)

    @cached_property
    def comms(self) -> StepCollectives:
        """What the device sends."""
        sync = self.model.config.training.sync_gradients_every
        return StepCollectives(self.device, self.layout, sync)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The share of each stage of a pipeline in the layers' time."""
        costs, _ = self.built.layer_costs
        return self.model.shares_of(
            self.built.split, self.layout.sizes["pp"], tuple(costs)
        )

    @cached_property
    def compute(self) -> PassSeconds:
        """Seconds of one microbatch."""
        return self.model.compute(self.layout)

    def prediction(self, memory: MemoryEstimate) -> Prediction:
        layout, machine = self.layout, self.machine
        zero = layout.sizes.get("dp", 1)
        update = self.device.optimizer_seconds(zero if layout.zero_stage else 1)
        once = self._exposed(self.comms.of_step(), self.compute.total)
        if layout.schedule:
            compute, exposed, bubble = self._pipelined(self.comms.of_microbatch())
        else:
            compute, exposed, bubble = self._accumulated()
        moved = 2 * memory.on_host / HOST_BANDWIDTH  # there and back
        return Prediction(
            compute=compute + update,
            exposed=exposed + once,
            bubble=bubble,
            overhead=machine.overhead["step"] + self._allocation() + moved,
            memory_bytes=round(memory.total),
            flops=self.model.work.flops * layout.global_batch_size,
            phases=self._phases(),
        )

    def least_seconds(self, pace: Pace) -> float:
        """See ``StepModel``."""
        sizes, zero = self.layout.sizes, self.layout.zero_stage
        shards = sizes.get("dp", 1) if zero else 1
        sent = self._exposed(self.comms.of_microbatch(), pace.whole)
        # Of this a longer microbatch hides more, in all stages at the same time.
        once = self._exposed(self.comms.of_step(), sys.float_info.max)
        once += self.device.optimizer_seconds(shards) + self.machine.overhead["step"]
        return max((pace.whole + sent) / sizes.get("pp", 1), pace.busy) + once

    def pace(self) -> Pace:
        """See ``StepModel``."""
        layout, compute = self.layout, self.compute
        sent = self.comms.of_activations()
        if not layout.schedule:
            whole = layout.microbatches * compute.total
            shown = layout.microbatches * self._exposed(sent, whole)
            return Pace(whole, whole + shown)
        if layout.schedule in IN_RUNS:
            work, exposed, bubble = self._pipelined(sent)
            return Pace(work * layout.sizes["pp"], work + exposed + bubble)
        # A table is made of legal sizes alone, and takes long.
        whole = layout.microbatches * float(sum(map(np.sum, self._stages(0))))
        return Pace(whole, whole / layout.sizes["pp"])

    def _phases(self) -> dict[str, float]:
        if self.model.config.training.objective == NEXT_TOKEN:
            return {}
        return self.model.phases(self.layout).seconds(self._seconds)

    def _allocation(self) -> float:
        """Seconds in which a CPU gets the pages of what a microbatch keeps."""
        # A stage has its own layers alone.
        kept = self._kept() / self.layout.sizes.get("pp", 1)
        return kept * self.machine.overhead["allocation"]

    def _kept(self) -> float:
        """Bytes that a microbatch keeps, were all layers on the device."""
        return self.device.kept_bytes(
            self.layout.micro_batch_size, self.layout.kept_policy
        )

    def _accumulated(self) -> tuple[float, float, float]:
        """Compute, exposed communication and bubble of microbatches in turn."""
        count = self.layout.microbatches
        compute = count * self.compute.total
        exposed = count * self._exposed(self.comms.of_microbatch(), self.compute.total)
        if count > 1:
            zero = self.layout.zero_stage >= 2
            shards = self.layout.sizes.get("dp", 1) if zero else 1
            compute += count * self.device.accumulation_seconds(shards)
        return compute, exposed, 0.0

    def _exposed(self, transfers: list[Calls], compute: float) -> float:
        """Seconds of communication that computation does not hide."""
        hidden = sum(self._seconds(each) for each in transfers if each.hides)
        shown = sum(self._seconds(each) for each in transfers if not each.hides)
        overlap = self.machine.efficiency["overlap"]
        return shown + max(hidden - overlap * compute, hidden * (1 - overlap))

    def _seconds(self, calls: Calls) -> float:
        return self.model.seconds(self.layout, calls)

    def _pipelined(self, transfers: list[Calls]) -> tuple[float, float, float]:
        """The same for a pipeline, whose devices go in lock-step from tick to tick.

        Args:
          transfers: Of a microbatch.
        """
        layout, compute = self.layout, self.compute
        table, shares = self.model.lockstep(layout), np.array(self.shares)
        forward, backward = self._stages(table.end)
        layers = compute.layers_forward + compute.layers_backward
        of_layers = [each for each in transfers if each.in_layers]
        of_ends = [each for each in transfers if not each.in_layers]
        sent = shares * self._exposed(of_layers, layers)
        sent[table.end] += self._exposed(of_ends, compute.total - layers)
        count, stages = layout.microbatches, table.stages
        of_ticks = partial(table.seconds, recomputes=layout.recomputes_stages)
        busy = of_ticks(forward, backward)
        all_time = of_ticks(forward + sent / 3, backward + 2 * sent / 3)
        passed_on = sum(self._seconds(each) for each in self.comms.of_tick())
        work = count * float(np.sum(forward + backward)) / stages
        exposed = all_time - busy + passed_on * table.ticks
        return work, exposed, max(busy - work, 0.0)

    def _stages(self, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the forward and the backward pass of each stage.

        Args:
          end: The stage that computes the loss.
        """
        compute, shares = self.compute, np.array(self.shares)
        forward = shares * compute.layers_forward
        backward = shares * compute.layers_backward
        forward[end] += compute.ends_forward
        backward[end] += compute.ends_backward
        if self.layout.recomputes_stages:
            backward += forward
        else:  # residuals are copied into a ring buffer
            forward += 2 * self._kept() * shares / self.machine.memory_rate
        return forward, backward
