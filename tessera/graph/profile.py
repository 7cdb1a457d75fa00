# SPDX-License-Identifier: Apache-2.0
"""``dist.profile``: communication against computation of one step, per mesh axis."""

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
from tessera.analysis.measured import Measured, measure
from tessera.analysis.rates import as_json, as_text
from tessera.analysis.trace_events import op_events
from tessera.errors import OutsideTraceError
from tessera.graph.function import Function, last_run
from tessera.graph.stages import Compiled

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

    def from_trace(self, folder: Path, executions: int, seconds: float) -> "Profile":
        """The same, with what a trace of the program's executions measured.

        Args:
          folder: What ``jax.profiler.start_trace`` was given.
          executions: How often the program ran while it was traced.
          seconds: That each of them took.
        """
        module = hlo.parse(self.compiled.as_text())
        found = measure(
            op_events(folder, module.name),
            module,
            self.collectives,
            executions=executions,
            seconds=seconds,
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


def profile(step: Function | None = None, *args: Any, **kwargs: Any) -> Profile:
    """Report a step's communication and computation, per mesh axis.

    Bytes, calls and operations are counted on the compiled program. With arrays for
    arguments the step runs a few times under JAX's profiler, and the times are measured
    where the backend's profiler tells operations apart. Without arguments, or with
    ``jax.ShapeDtypeStruct`` for arrays, or on a mesh that this machine lacks, nothing
    runs: the times are then an estimate from the device's peaks, and say so.

    The results of these runs are dropped. What the step would overwrite or free, its
    donated arguments and dicts that it assigns into, is copied before.

    Args:
      step: A ``ts.function`` or training step; None is the one that ran last.
      *args: Arguments to run it on; without any, its last program is reported.
      **kwargs: The same by name.

    Returns:
      A report that prints. Times are seconds of one execution on one device, the mean
      of them; those of a collective include waiting for the other devices.

    Raises:
      OutsideTraceError: [T302] nothing was run yet.

    Example:
      >>> from tessera.graph.function import function
      >>> report = profile(function(lambda x: x @ x), jnp.ones((64, 64)))
      >>> report.flops.matmul, report.measured.executions
      (524288, 3)
    """
    if args or kwargs:
        assert step is not None
        found = of_program(step.compile(*args, **kwargs))
        return _measured(found, step, args, kwargs)
    compiled = last_run() if step is None else step.last
    if compiled is None:
        raise OutsideTraceError(
            "there is no step to profile: none was run yet",
            fix="run one first, or pass its arguments too: dist.profile(step, batch)",
        )
    reason = "it takes the step's arguments, as in dist.profile(step, batch)"
    return replace(of_program(compiled), reason=reason)


def of_program(compiled: Compiled) -> Profile:
    """What can be said of a compiled step without running it."""
    graph = compiled.traced.graph
    flops, kind = count(graph.program), graph.device_kind
    dtype = matmul_dtype(graph.program)
    estimate = balance(compiled.collectives, flops, compiled.memory, kind, dtype)
    return Profile(compiled, flops, estimate)


def _measured(found: Profile, step: Function, args: Any, kwargs: Any) -> Profile:
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
