# SPDX-License-Identifier: Apache-2.0
"""Options of XLA for the whole process, checked before they can end it.

XLA aborts the process that hands it a flag it does not know, at the first touch of a
device and with a page of others; which flags there are changes with every release. So
another process tries them first.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import jax

from tessera import _jax
from tessera.errors import BackendStartedError, SettingValueError

_FORM: Final = re.compile(r"--xla_[a-z0-9_]+(=[^\s'\"]*)?")
_LEVEL: Final = "jax_optimization_level"
# The CPU backend reads the flags of all platforms and starts the soonest.
_TRY: Final = "import jax; jax.devices()"
_PATIENCE_S: Final = 120.0


def set_xla_options(flags: Sequence[str], optimization_level: str | None) -> None:
    """Have XLA compile with some flags and a level of optimization.

    Args:
      flags: Such as ``"--xla_gpu_enable_pipelined_p2p=true"``, after those that
        ``XLA_FLAGS`` has already; the later of two is the one that holds.
      optimization_level: ``"O0"`` to ``"O3"``; None leaves JAX's. On GPUs ``"O1"`` has
        collectives overlap with computation.

    Raises:
      SettingValueError: [T502] XLA does not know a flag, or not its value.
      BackendStartedError: [T701] the backend has read its flags.
    """
    if optimization_level is not None:
        jax.config.update(_LEVEL, optimization_level)
    if not flags:
        return
    if _jax.backend_started():
        raise BackendStartedError(
            "XLA has read its flags",
            got="JAX has started its backend",
            fix="set runtime.xla_flags before anything that touches a device",
        )
    if refused := [flag for flag in flags if not _FORM.fullmatch(flag)]:
        raise SettingValueError(
            "runtime.xla_flags takes flags of XLA",
            got=", ".join(map(repr, refused)),
            fix="write them as --xla_name=value",
        )
    known = os.environ.get("XLA_FLAGS", "").split()
    if _why_not([*known, *flags]):
        reasons = {flag: _why_not([flag]) for flag in flags}
        raise SettingValueError(
            "XLA does not take runtime.xla_flags",
            got="\n".join(
                f"{flag}: {reason}" for flag, reason in reasons.items() if reason
            )
            or f"XLA_FLAGS={os.environ.get('XLA_FLAGS')!r} is refused already",
            fix=f"leave them out: this is the XLA of jaxlib {jax.lib.__version__}",
        )
    os.environ["XLA_FLAGS"] = " ".join([*known, *flags])


def _why_not(flags: Sequence[str]) -> str | None:
    """Why XLA refuses some flags, in a process of their own; None if it does not."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    tried = subprocess.run(
        [sys.executable, "-c", _TRY],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    if tried.returncode == 0:
        return None
    unknown = b"Unknown flag in XLA_FLAGS" in tried.stderr
    return "there is no such flag" if unknown else "it does not take this value"
