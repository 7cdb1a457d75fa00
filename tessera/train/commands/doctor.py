# SPDX-License-Identifier: Apache-2.0
"""``tessera doctor``: versions, devices, compile cache, and what is wrong with them.

Its output belongs into a bug report. JAX starts in a separate process, because a flag
that XLA does not know, or a broken driver, aborts the process or never returns.
"""

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tessera.errors import TesseraError
from tessera.train.runtime.accelerators import find_accelerators
from tessera.train.runtime.python_process import python_command
from tessera.train.runtime.rank_consistency import installed
from tessera.version import __version__

# Beside those that JAX shows.
_LIBRARIES: Final = (
    "flax",
    "optax",
    "orbax-checkpoint",
    "hydra-core",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
)
# Beside those of JAX and XLA.
_VARIABLES: Final = re.compile(
    "(TESSERA|PJRT|NCCL|CUDA|HIP|ROCR|TPU|MASTER)_|(LD_LIBRARY_PATH|(LOCAL_)?RANK)$"
    "|WORLD_SIZE$"
)
# Parts of names whose values nobody should paste into a report.
_SECRET: Final = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_PATIENCE_S: Final = 120.0
# Starts the backend, compiles and runs one program on it, and prints what there is.
_PROBE: Final = """
import json, jax
assert jax.jit(lambda x: x + 1)(1) == 2
print(json.dumps({
    "environment": jax.print_environment_info(return_string=True),
    "platforms": [device.platform for device in jax.local_devices()],
    "compile_cache": jax.config.values["jax_compilation_cache_dir"],
}))
"""


class Problem(NamedTuple):
    """Something that is wrong, and what to do about it."""

    text: str
    fix: str


class Report(NamedTuple):
    """What ``tessera doctor`` shows: lines by section, and what is wrong."""

    sections: Mapping[str, Sequence[str]]
    problems: Sequence[Problem]

    def __str__(self) -> str:
        problems = [f"{text}\n    fix: {fix}" for text, fix in self.problems]
        sections = {**self.sections, "problems": problems}
        return "\n".join(
            line
            for title, lines in sections.items()
            for line in (title, *(f"  {line}" for line in lines or ["none"]))
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns 0, or 1 where something is wrong."""
    ArgumentParser("tessera doctor", description=main.__doc__).parse_args(arguments)
    report = examine(os.environ)
    sys.stdout.write(f"{report}\n")
    return 1 if report.problems else 0


def examine(environ: Mapping[str, str]) -> Report:
    """Everything that ``tessera doctor`` shows.

    Args:
      environ: The environment variables; JAX is started with them.
    """
    started, failure = _start_jax(environ)
    platforms = started.get("platforms", [])
    folder = started.get("compile_cache")
    none = "none: JAX_COMPILATION_CACHE_DIR or runtime.compile_cache names one"
    versions = {"tessera": __version__, **installed(_LIBRARIES)}
    sections = {
        "versions": [f"{name} {text}" for name, text in versions.items()],
        "JAX": started.get("environment", "not started").splitlines(),
        "compile cache": [folder or none],
        "environment": [
            f"{name}={'(hidden)' if _SECRET.search(name) else value}"
            for name, value in sorted(environ.items())
            if _VARIABLES.match(name)
        ],
        "notes": [*_notes(platforms)],
    }
    found = [failure] if failure else _device_problems(platforms, environ)
    return Report(sections, [*found, *_cache_problems(folder)])


def _start_jax(
    environ: Mapping[str, str],
) -> tuple[dict[str, Any], Problem | None]:
    """What JAX says of itself, or the problem that prevents it from starting."""
    try:
        done = subprocess.run(
            python_command(_PROBE),
            # A GPU that a run uses has no memory left to preallocate.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, Problem(
            f"JAX did not start within {_PATIENCE_S:g} s",
            "end the process that holds the devices, or use JAX_PLATFORMS=cpu",
        )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
    named = [line for line in lines if "XLA_FLAGS" in line or "Error" in line]
    # Without the level, time and source line of XLA's log.
    reason = re.sub(r"^[A-Z]\d{4} .*?\] ", "", (named or lines)[-1])
    return {}, Problem(
        f"JAX cannot start: {reason}",
        "correct XLA_FLAGS and JAX_PLATFORMS, or reinstall jax and its plugin",
    )


def _device_problems(
    platforms: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Problem]:
    accelerators = find_accelerators(environ)
    is_cpu = set(platforms) == {"cpu"}
    if accelerators and is_cpu:
        extra = "tpu" if accelerators[0] == "TPU" else "cuda12"
        yield Problem(
            f"{len(accelerators)} × {accelerators[0]} is here, and JAX uses the CPU",
            f"install JAX's plugin: pip install 'tessera-spmd[{extra}]'",
        )
    text = environ.get("PJRT_NPROC", "")
    threads = int(text) if text.isdecimal() else 0
    if is_cpu and len(platforms) > 1 and threads < 32:
        yield Problem(
            f"{len(platforms)} CPU devices can deadlock: PJRT_NPROC={text or 'unset'}",
            "export PJRT_NPROC=32",
        )


def _notes(platforms: Sequence[str]) -> Iterator[str]:
    """What is no problem of this machine, and good to know."""
    # Imported here: JAX is imported after it has started in a process of its own.
    from tessera.jax_compat.workarounds import fault_of

    jaxlib = installed(["jaxlib"]).get("jaxlib", "")
    for kind in sorted(set(platforms)):
        if fault := fault_of(jaxlib, kind):
            yield fault


def _cache_problems(folder: str | None) -> Iterator[Problem]:
    if folder is None:
        return
    try:
        from tessera.train.runtime.compile_cache import open_compile_cache

        open_compile_cache(folder)
    except ImportError:
        return  # without JAX, which is a problem already
    except TesseraError as error:
        yield Problem(f"{error.what}: {error.got}", error.fix)
