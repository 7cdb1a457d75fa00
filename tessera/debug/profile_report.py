# SPDX-License-Identifier: Apache-2.0
"""Computes the report of ``dist.profile``: operations, bytes and times of a program."""

import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tessera.analysis import hlo
from tessera.analysis.cost import Balance, balance
from tessera.analysis.flops import Flops, count, matmul_dtype
from tessera.analysis.ledger import Ledger
from tessera.analysis.measured_rates import as_json, as_text
from tessera.analysis.measured_times import Measured, measure
from tessera.analysis.trace_events import COMMAND_BUFFERS, op_events
from tessera.graph.compile_stages import Compiled
from tessera.graph.function import Function

_EXECUTIONS = 3


@dataclass(frozen=True)
class Profile:
    """Computation and communication of one execution of a step on each device.

    Attributes:
      compiled: The program.
      flops: Its floating-point operations, all devices together.
      balance: The least time of computation and communication, an estimate from the
        device's peaks.
      measured: The measured times; None where nothing was measured.
      reason: Why nothing was measured; ``""`` where it was.
    """

    compiled: Compiled
    flops: Flops
    balance: Balance
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
        module = hlo.parse(self.compiled.as_text())
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

    def as_text(self) -> str:
        """Operations; times, measured or estimated; then every collective."""
        times = [self.balance.as_text()]
        if self.measured is not None:
            times = [as_text(self.measured, self.balance, self.collectives)]
        elif self.reason:
            times.append(f"not measured: {self.reason}")
        head = "\n".join((self.flops.as_text(), "", *times))
        return f"{head}\n\n{self.collectives.as_text()}"

    def as_json(self) -> dict[str, Any]:
        """The same figures, in bytes, seconds and FLOPs."""
        measured = self.measured
        return {
            "matmul_flops": self.flops.matmul,
            "other_flops": self.flops.other,
            "device_kind": self.balance.device_kind,
            "estimated_compute_seconds": self.balance.compute,
            "estimated_communication_share": self.balance.communication_share,
            "measured": measured and as_json(measured, self.balance, self.collectives),
            "not_measured": self.reason,
            "memory": self.compiled.memory.as_json(),
            "collectives": self.collectives.as_json(),
        }

    __str__ = as_text
    __repr__ = as_text


def of_program(compiled: Compiled) -> Profile:
    """The profile of a compiled step that is not run: an estimate."""
    graph = compiled.traced.graph
    flops, kind = count(graph.program), graph.device_kind
    dtype = matmul_dtype(graph.program)
    estimate = balance(compiled.collectives, flops, compiled.memory, kind, dtype)
    return Profile(compiled, flops, estimate)


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
