# SPDX-License-Identifier: Apache-2.0
"""Compiler options that avoid errors of the XLA of one version of JAX.

On CPUs, JAX 0.10 fuses matmuls and sums with what follows them. Some of these fusions
compute wrong values in the last rows of many (jax-ml/jax#39103), and some of arrays of
seven dims crash (jax-ml/jax#40412). With the option below each matmul is a kernel of
its own, and XLA fuses the rest as it did before. JAX 0.11.2 has corrected both.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Final

import jax
from jax._src import core

_FUSIONS: Final = "xla_cpu_experimental_ynn_fusion_type"
_FAULTY: Final = "0.10."
_MATMULS_ALONE: Final = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def fault_of(jaxlib: str, platform: str) -> str:
    """What ``jax.jit`` computes wrongly with a version of jaxlib, or ``""``."""
    if platform != "cpu" or not jaxlib.startswith(_FAULTY):
        return ""
    return (
        f"jaxlib {jaxlib} computes wrong values on CPUs in some sums of products "
        "(jax-ml/jax#39103): Tessera compiles with an option that avoids it, "
        "jax.jit does not; JAX 0.11.2 needs none"
    )


def correct_options(platform: str) -> dict[str, str]:
    """Options to compile a program with; none that ``XLA_FLAGS`` sets."""
    version = ".".join(map(str, jax.__version_info__))
    if not fault_of(version, platform) or _FUSIONS in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {_FUSIONS: _MATMULS_ALONE}


def rounding_options(platform: str) -> dict[str, bool | str]:
    """Options with which programs round alike on every mesh.

    XLA for CPUs simplifies a program of one device and one of several from other forms
    (a/b*c as a*c/b); without this pass it computes what is written. GPUs' kernels add
    in any order unless told not to. XLA keeps values of narrow arrays in f32 inside a
    fusion, which may be another on a mesh.
    """
    options: dict[str, bool | str] = {"xla_allow_excess_precision": False}
    if platform == "gpu":
        options["xla_gpu_deterministic_ops"] = True
    if platform == "cpu":
        options["xla_disable_hlo_passes"] = "algsimp"
    return options


class CorrectJit:
    """``jax.jit`` of a function, compiled with these options.

    A call in a program that JAX traces becomes a part of it, which has no options of
    its own.

    Args:
      function: What is compiled.
      rounds_alike: Whether with ``rounding_options`` too.
      **options: Of ``jax.jit``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        rounds_alike: bool = False,
        **options: Any,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        self._rounds_alike = rounds_alike
        self._part = jax.jit(function, **options)

    @functools.cached_property
    def alone(self) -> Any:
        """The jitted function of calls outside of traces."""
        platform = jax.default_backend()
        correct: dict[str, bool | str] = {**correct_options(platform)}
        if self._rounds_alike:
            correct |= rounding_options(platform)
        options = correct or None
        return jax.jit(self._function, compiler_options=options, **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, or become part of what JAX traces."""
        function = self.alone if core.trace_state_clean() else self._part
        return function(*args, **kwargs)
