# SPDX-License-Identifier: Apache-2.0
"""Turns ``--xla_name=value`` flags into options of single compilations.

XLA aborts the process that has a flag in ``XLA_FLAGS`` that it does not know, and which
flags there are changes with every release. Given to a single compilation, by
``jax.stages.Lowered.compile(compiler_options=...)``, the same flag is an exception.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import jax

from tessera.errors import SettingValueError

# Hashable, because a program that is compiled otherwise is another program.
CompilerOptions: TypeAlias = tuple[tuple[str, bool | str], ...]

_FLAG: Final = re.compile(r"--(xla_[a-z0-9_]+)(?:=([^\s'\"]*))?")
_BOOLS: Final = {"true": True, "false": False}
# XLA takes it for a compilation, where it does nothing.
_NEEDS_NEW_BACKEND: Final = "--xla_force_host_platform_device_count"


def compiler_options(flags: Sequence[str]) -> CompilerOptions:
    """The options that flags stand for, as this machine's XLA takes them.

    Starts the backend, and compiles a trivial program.

    Args:
      flags: Such as ``"--xla_gpu_enable_pipelined_p2p=true"``. The last of two for one
        option holds; one without a value is true.

    Raises:
      SettingValueError: [T502] XLA does not know a flag, or not its value.

    Example:
      >>> compiler_options(["--xla_cpu_enable_fast_math=false"])
      (('xla_cpu_enable_fast_math', False),)
    """
    matches = {flag: _FLAG.fullmatch(flag) for flag in flags}
    malformed = [
        flag
        for flag, match in matches.items()
        if match is None or flag.startswith(_NEEDS_NEW_BACKEND)
    ]
    if malformed:
        raise SettingValueError(
            "runtime.xla_flags takes flags of XLA's compiler",
            got=", ".join(map(repr, malformed)),
            fix="write them as --xla_name=value; model.mesh_shape says how many CPU "
            "devices are simulated",
        )
    options: dict[str, bool | str] = {}
    for match in filter(None, matches.values()):
        name, value = match.groups(default="true")
        options[name] = _BOOLS.get(value.lower(), value)
    if options and (reason := _refusal(options)):
        raise SettingValueError(
            "XLA does not take runtime.xla_flags",
            got=reason,
            fix=f"leave it out: this is the XLA of jaxlib {jax.lib.__version__}",
        )
    return tuple(options.items())


def _refusal(options: Mapping[str, bool | str]) -> str | None:
    """Why XLA refuses to compile with some options; None if it does not."""
    try:
        jax.jit(lambda: 0).lower().compile(dict(options))
    except jax.errors.JaxRuntimeError as error:
        return str(error).partition(": ")[2].splitlines()[0]
    return None
