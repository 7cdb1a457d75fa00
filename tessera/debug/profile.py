# SPDX-License-Identifier: Apache-2.0
"""``dist.profile``: reports communication and computation of a step, per mesh axis."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tessera.errors import OutsideTraceError
from tessera.graph.function import Function, last_run

if TYPE_CHECKING:
    from tessera.debug.profile_report import Profile

__all__ = ["profile"]


def profile(step: Function | None = None, *args: Any, **kwargs: Any) -> "Profile":
    """Report a step's communication and computation, per mesh axis.

    Bytes, calls and operations are counted on the compiled program. With arrays for
    arguments the step runs a few times under JAX's profiler, and times are measured
    where the backend's profiler records single operations. Without arguments, or with
    ``jax.ShapeDtypeStruct`` for arrays, or on a mesh that this machine lacks, nothing
    runs: the times are then an estimate from the device's peaks, and marked as such.

    The results of these runs are dropped. Donated arguments, and dicts that the step
    assigns into, are copied before.

    Args:
      step: A ``ts.function`` or training step; None is the one that ran last.
      *args: Arguments to run it on; without any, its last program is reported.
      **kwargs: The same by name.

    Returns:
      A report that prints. Times are mean seconds of one execution on one device;
      those of a collective include waiting for the other devices.

    Raises:
      OutsideTraceError: [T302] no step has run yet.

    Example:
      >>> import jax.numpy as jnp
      >>> from tessera.graph.jit import function
      >>> report = profile(function(lambda x: x @ x), jnp.ones((64, 64)))
      >>> report.flops.matmul, report.measured.executions
      (524288, 3)
    """
    # It imports the analyses, which few programs use.
    from tessera.debug.profile_report import measured, of_program

    if args or kwargs:
        assert step is not None
        estimate = of_program(step.compile(*args, **kwargs))
        return measured(estimate, step, args, kwargs)
    compiled = last_run() if step is None else step.last
    if compiled is None:
        raise OutsideTraceError(
            "there is no step to profile: none was run yet",
            fix="run one first, or pass its arguments too: dist.profile(step, batch)",
        )
    reason = "it takes the step's arguments, as in dist.profile(step, batch)"
    return replace(of_program(compiled), reason=reason)
