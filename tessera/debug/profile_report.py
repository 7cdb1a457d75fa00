# SPDX-License-Identifier: Apache-2.0
"""Computes the report of ``dist.profile``: operations, bytes and times of a program."""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp

from tessera.analysis.device_peaks import peak_flops
from tessera.analysis.flops import Flops, count, format_flops, matmul_dtype
from tessera.analysis.ledger import Ledger
from tessera.analysis.measured_times import Measured, measure
from tessera.analysis.memory import format_bytes
from tessera.analysis.slice_programs import program_of
from tessera.analysis.tables import aligned, format_seconds
from tessera.analysis.trace_events import COMMAND_BUFFERS, op_events
from tessera.graph.compile_stages import Compiled
from tessera.graph.function import Function
from tessera.targets.link_times import Span, collective_seconds, sent_bytes
from tessera.targets.machine import machine_of_kind

_EXECUTIONS = 3


# The columns of measured times come last.
_COLUMNS: Final = (
    *("part", "amount", "at peak", "calls"),
    *("time", "share", "hidden", "rate"),
)

Axes: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """Computation and communication of one execution of a step on each device.

    Attributes:
      compiled: The program.
      flops: Its floating-point operations, all devices together.
      measured: The measured times; None where nothing was measured.
      reason: Why nothing was measured; ``""`` where it was.
    """

    compiled: Compiled
    flops: Flops
    measured: Measured | None = None
    reason: str = ""

    @property
    def collectives(self) -> Ledger:
        """Every collective of the program."""
        return self.compiled.collectives

    def from_trace(
        self, folder: Path, executions: int, seconds: float | None = None
    ) -> "Profile":
        """The profile with times measured by a trace of the program's executions.

        Args:
          folder: The log folder of ``jax.profiler.start_trace``.
          executions: How often the program ran during the trace.
          seconds: Time of each execution; None takes the time from the first operation
            of the trace to the last.
        """
        mesh = self.compiled.traced.graph.mesh
        module = program_of(self.compiled.as_text(), mesh)
        events = op_events(folder, module.name)
        if seconds is None and events:
            first, last = min(e.start for e in events), max(e.end for e in events)
            seconds = (last - first) / executions
        times = measure(
            events,
            module,
            self.collectives,
            executions=executions,
            seconds=seconds or 0.0,
        )
        if times is None:
            return replace(self, reason=self._without_operations())
        return replace(self, measured=times, reason="")

    def _without_operations(self) -> str:
        reason = "this backend's trace has no operations"
        if self.compiled.traced.graph.platform == "gpu":
            reason += f"; compiled with XLA_FLAGS=--{COMMAND_BUFFERS}= it has"
        return reason

    @property
    def device_kind(self) -> str:
        """JAX's name of the device that the program is for."""
        return self.compiled.traced.graph.device_kind

    @property
    def local_flops(self) -> float:
        """FLOPs in matmuls of one device; they are split evenly."""
        return self.flops.matmul / math.prod(self.collectives.mesh_shape.values())

    @cached_property
    def least_compute(self) -> float | None:
        """Seconds of the matmuls at the device's peak; None where it is unknown."""
        dtype = matmul_dtype(self.compiled.traced.graph.program)
        rate = peak_flops(self.device_kind, dtype)
        return self.local_flops / rate if rate else None

    @cached_property
    def least_communication(self) -> Mapping[Axes, float | None]:
        """Seconds of collectives by axes, at the rate of large ones on the fast links.

        None where the device's links are unknown, or what a collective is.
        """
        machine = machine_of_kind(self.device_kind)
        least: dict[Axes, float | None] = {}
        for row in self.collectives.rows:
            before = least.get(row.axes, 0.0)
            if machine is None or row.is_unknown or before is None:
                least[row.axes] = None
                continue
            size = row.group_size
            where = Span(size, size, ((size, 1.0),) if machine.is_torus else ())
            spent = collective_seconds(machine, row.kind, row.nbytes, where)
            least[row.axes] = before + row.counted_calls * spent
        return least

    def as_text(self) -> str:
        """Operations; computation and communication; then every collective."""
        title = f"estimate for {self.device_kind}, per device and execution"
        columns, notes = _COLUMNS[:3], list(self._balance())
        if self.measured is not None:
            spent = format_seconds(self.measured.seconds)
            title = (
                f"measured on {self.device_kind}, per device and execution: mean of "
                f"{self.measured.executions} executions of {spent}"
            )
            columns, notes = _COLUMNS, list(self._notes(self.measured))
        elif self.reason:
            notes.append(f"not measured: {self.reason}")
        rows = [cells[: len(columns)] for cells in self._rows()]
        table = aligned(columns, rows, right=columns[1:], cut=columns[:1])
        head = "\n".join((self.flops.as_text(), "", title, table, *notes))
        return f"{head}\n\n{self.collectives.as_text()}"

    def _rows(self) -> Iterator[list[str]]:
        amount = f"{format_flops(self.local_flops)} FLOPs"
        compute = self.measured.compute if self.measured else 0.0
        achieved = format_flops(self.local_flops / compute) if compute else "0"
        yield [
            "computation",
            amount,
            format_seconds(self.least_compute),
            "",
            format_seconds(compute),
            self._share(compute),
            "",
            f"{achieved} FLOP/s",
        ]
        for axes, total in self.collectives.by_axis().items():
            least = format_seconds(self.least_communication[axes])
            cells = [f"communication over {'×'.join(axes)}", format_bytes(total.nbytes)]
            yield [*cells, least, *self._measured_cells(axes)]
        if self.measured is not None:
            idle = self.measured.idle
            spent = format_seconds(idle)
            yield ["idle", "", "", "", spent, self._share(idle), "", ""]

    def _measured_cells(self, axes: Axes) -> list[str]:
        if self.measured is None:
            return []
        time, rate = self.measured.communication[axes], self.bandwidth(axes)
        return [
            f"{time.calls:g}",
            format_seconds(time.seconds),
            self._share(time.seconds),
            f"{100 * time.hidden / time.seconds:.0f} %" if time.seconds else "",
            f"{format_bytes(rate)}/s" if rate else "",
        ]

    def _share(self, seconds: float) -> str:
        whole = self.measured.seconds if self.measured else 0.0
        return f"{100 * seconds / whole:.0f} %" if whole else ""

    def _balance(self) -> Iterator[str]:
        sent, compute = self.least_communication.values(), self.least_compute
        if compute and None not in sent:
            least = math.fsum(each or 0.0 for each in sent)
            share = f"{100 * least / (least + compute):.0f} %"
            yield f"communication is {share} of both at peak, if nothing overlaps"

    def _notes(self, measured: Measured) -> Iterator[str]:
        if measured.overlap is not None:
            hidden = f"{100 * measured.overlap:.0f} %"
            yield f"{hidden} of communication ran while the device computed"
        yield "a collective's time includes waiting for the other devices"
        if self.least_compute and measured.seconds:
            share = f"{100 * self.least_compute / measured.seconds:.0f} %"
            yield f"matmuls reach {share} of the device's peak over the whole step"
        elif self.device_kind == "cpu":
            yield "devices simulated on a CPU share its cores"

    def bandwidth(self, axes: Axes) -> float | None:
        """Bytes/s that each device sends while collectives over some axes run.

        The bytes are those of the algorithm that sends least: the bus bandwidth of
        NCCL's tests. None where it is unknown.
        """
        rows = [row for row in self.collectives.rows if row.axes == axes]
        seconds = self.measured.communication[axes].seconds if self.measured else 0.0
        if not seconds or any(row.is_unknown for row in rows):
            return None
        sent = sum(
            sent_bytes(row.kind, row.nbytes, row.group_size) * row.counted_calls
            for row in rows
        )
        return sent / seconds

    __str__ = as_text
    __repr__ = as_text


def of_program(compiled: Compiled) -> Profile:
    """The profile of a compiled step that is not run: an estimate."""
    return Profile(compiled, count(compiled.traced.graph.program))


def measured(profile: Profile, step: Function, args: Any, kwargs: Any) -> Profile:
    """A profile with the times of a few runs, where the step can run."""
    mesh = profile.compiled.traced.graph.mesh
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return replace(profile, reason="the arguments are shapes, not arrays")
    if mesh is not None and mesh.is_abstract:
        return replace(profile, reason="this machine does not have the mesh's devices")
    _seconds(step, args, kwargs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=_options())
        except RuntimeError:
            return replace(profile, reason="another trace of the profiler is running")
        try:
            spent = [_seconds(step, args, kwargs) for _ in range(_EXECUTIONS)]
        finally:
            jax.profiler.stop_trace()
        mean = math.fsum(spent) / len(spent)
        return profile.from_trace(Path(folder), _EXECUTIONS, mean)


def _options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow the measured step down
    return options


def _seconds(step: Function, args: Any, kwargs: Any) -> float:
    """Wall time of one run, on copies of what it may overwrite or free."""
    args, kwargs = jax.block_until_ready(jax.tree.map(_copy, (args, kwargs)))
    start = time.perf_counter()
    jax.block_until_ready(step(*args, **kwargs))
    return time.perf_counter() - start


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
