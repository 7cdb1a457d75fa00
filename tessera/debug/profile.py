# SPDX-License-Identifier: Apache-2.0
"""``dist.profile``: communication against computation of one step, per mesh axis."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tessera.api.function import Function, last_run
from tessera.errors import OutsideTraceError

if TYPE_CHECKING:
    from tessera.debug.profile_report import Profile


def profile(step: Function | None = None, *args: Any, **kwargs: Any) -> "Profile":
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
      >>> import jax.numpy as jnp
      >>> from tessera.api.function import function
      >>> report = profile(function(lambda x: x @ x), jnp.ones((64, 64)))
      >>> report.flops.matmul, report.measured.executions
      (524288, 3)
    """
    # Which imports the analyses: a program that asks for none does without.
    from tessera.debug.profile_report import measured, of_program

    if args or kwargs:
        assert step is not None
        found = of_program(step.compile(*args, **kwargs))
        return measured(found, step, args, kwargs)
    compiled = last_run() if step is None else step.last
    if compiled is None:
        raise OutsideTraceError(
            "there is no step to profile: none was run yet",
            fix="run one first, or pass its arguments too: dist.profile(step, batch)",
        )
    reason = "it takes the step's arguments, as in dist.profile(step, batch)"
    return replace(of_program(compiled), reason=reason)
