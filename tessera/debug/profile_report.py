# SPDX-License-Identifier: Apache-2.0
"""The report of ``dist.profile``: what a program computes and sends, and how long."""

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
from tessera.analysis.measured_times import Measured, measure
from tessera.analysis.rates import as_json, as_text
from tessera.analysis.trace_events import op_events
from tessera.api.function import Function
from tessera.compiler.stages import Compiled

_EXECUTIONS = 3


@dataclass(frozen=True)
class Profile:
    """What one execution of a step computes and sends on each device, and how long.

    Attributes:
      compiled: The program.
      flops: Its floating-point operations, all devices together.
      balance: The time at best of computing and of sending, an estimate from the
        device's peaks.
      measured: The time that they took; None where it was not measured.
      reason: Why it was not measured; ``""`` where it was.
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
        """The same, with what a trace of the program's executions measured.

        Args:
          folder: What ``jax.profiler.start_trace`` was given.
          executions: How often the program ran while it was traced.
          seconds: That each of them took; None takes the time from the first of the
            trace's operations to the last.
        """
        module = hlo.parse(self.compiled.as_text())
        events = op_events(folder, module.name)
        if seconds is None and events:
            first, last = min(e.start for e in events), max(e.end for e in events)
            seconds = (last - first) / executions
        found = measure(
            events,
            module,
            self.collectives,
            executions=executions,
            seconds=seconds or 0.0,
        )
        if found is None:
            return replace(self, reason="this backend's trace has no operations")
        return replace(self, measured=found, reason="")

    def as_text(self) -> str:
        """Operations; times, measured or at best; then every collective."""
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
    """What can be said of a compiled step without running it."""
    graph = compiled.traced.graph
    flops, kind = count(graph.program), graph.device_kind
    dtype = matmul_dtype(graph.program)
    estimate = balance(compiled.collectives, flops, compiled.memory, kind, dtype)
    return Profile(compiled, flops, estimate)


def measured(found: Profile, step: Function, args: Any, kwargs: Any) -> Profile:
    """A profile with the times of a few runs, where the step can run."""
    mesh = found.compiled.traced.graph.mesh
    if any(
        isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((args, kwargs))
    ):
        return replace(found, reason="the arguments are shapes, not arrays")
    if mesh is not None and mesh.is_abstract:
        return replace(found, reason="this machine does not have the mesh's devices")
    _seconds(step, args, kwargs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=_options())
        except RuntimeError:
            return replace(found, reason="another trace of the profiler is running")
        try:
            spent = [_seconds(step, args, kwargs) for _ in range(_EXECUTIONS)]
        finally:
            jax.profiler.stop_trace()
        return found.from_trace(
            Path(folder), _EXECUTIONS, math.fsum(spent) / len(spent)
        )


def _options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what is measured
    return options


def _seconds(step: Function, args: Any, kwargs: Any) -> float:
    """How long one run takes, on copies of what it may overwrite or free."""
    args, kwargs = jax.block_until_ready(jax.tree.map(_copy, (args, kwargs)))
    start = time.perf_counter()
    jax.block_until_ready(step(*args, **kwargs))
    return time.perf_counter() - start


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
