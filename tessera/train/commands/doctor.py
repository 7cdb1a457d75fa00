# SPDX-License-Identifier: Apache-2.0
"""``tessera doctor``: versions, devices, links, compile cache, and what is wrong.

Its output belongs into a bug report. JAX starts in a separate process, because a flag
that XLA does not know, or a broken driver, aborts the process or never returns.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final

from tessera.errors import TesseraError
from tessera.train.runtime.accelerators import find_accelerators
from tessera.train.runtime.python_process import python_command
from tessera.train.runtime.rank_consistency import installed
from tessera.version import __version__

_LIBRARIES: Final = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "hydra-core", "numpy"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu"),
)
_VARIABLES: Final = (
    *("JAX_", "XLA_", "TESSERA_", "PJRT_", "NCCL_", "CUDA_", "HIP_", "ROCR_", "TPU_"),
    *("LD_LIBRARY_PATH", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
)
# Parts of names whose values nobody should paste into a report.
_SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")
# Of this jaxlib, for CPUs; ``workarounds`` says more.
_WRONG_ON_CPU: Final = "0.10."
_PATIENCE_S: Final = 120.0
# Starts the backend, compiles and runs one program on it, and prints what there is.
_PROBE: Final = """
import json, jax
devices = [
    {
        "kind": device.device_kind,
        "platform": device.platform,
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }
    for device in jax.local_devices()
]
assert jax.jit(lambda x: x + 1)(1) == 2
print(json.dumps({
    "devices": devices,
    "compile_cache": jax.config.values["jax_compilation_cache_dir"],
}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns 0, or 1 where something is wrong."""
    parser = ArgumentParser("tessera doctor", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    report = examine(os.environ)
    text = json.dumps(report, indent=2) if options.json else as_text(report)
    sys.stdout.write(f"{text}\n")
    return 1 if report["problems"] else 0


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """Everything that ``tessera doctor`` shows.

    Args:
      environ: The environment variables; JAX is started with them.

    Returns:
      ``versions``, ``devices``, ``links``, ``compile_cache``, ``environment``,
      ``notes``, and ``problems``: a list of ``{"problem": …, "fix": …}``.
    """
    started, failure = _start_jax(environ)
    devices = started.get("devices", [])
    folder = started.get("compile_cache")
    problems = [
        *_missing_libraries(),
        *([failure] if failure else _device_problems(devices, environ)),
        *_cache_problems(folder),
    ]
    return {
        "versions": _versions(),
        "devices": devices,
        "links": _links(),
        "compile_cache": {"folder": folder, "bytes": _folder_bytes(folder)},
        "environment": {
            name: "(hidden)" if any(part in name for part in _SECRET) else value
            for name, value in sorted(environ.items())
            if name.startswith(_VARIABLES)
        },
        "notes": list(_notes(devices)),
        "problems": [{"problem": what, "fix": fix} for what, fix in problems],
    }


def as_text(report: Mapping[str, Any]) -> str:
    """The report as a person reads it."""
    cache = report["compile_cache"]
    sections = {
        "versions": [f"{name} {text}" for name, text in report["versions"].items()],
        "devices": [_device_line(device) for device in report["devices"]],
        "links": report["links"].splitlines(),
        "compile cache": [
            f"{cache['folder']}: {(cache['bytes'] or 0) / 2**20:.1f} MiB"
            if cache["folder"]
            else "none: JAX_COMPILATION_CACHE_DIR or runtime.compile_cache names one"
        ],
        "environment": [f"{k}={v}" for k, v in report["environment"].items()],
        "notes": report["notes"],
        "problems": [
            line
            for one in report["problems"]
            for line in (one["problem"], f"  fix: {one['fix']}")
        ],
    }
    return "\n".join(
        line
        for title, lines in sections.items()
        for line in (title, *(f"  {line}" for line in lines or ["none"]))
    )


def _versions() -> dict[str, str]:
    return {
        "tessera": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "OS": platform.platform(),
        **installed(_LIBRARIES),
    }


def _missing_libraries() -> Iterator[tuple[str, str]]:
    """The libraries that Tessera requires and that are not installed."""
    try:
        required = requires("tessera-spmd") or []
    except PackageNotFoundError:
        yield "the package tessera-spmd is not installed", "pip install tessera-spmd"
        return
    for line in (line for line in required if "extra ==" not in line):
        name = re.match(r"[\w.-]*", line)
        try:
            version(name.group() if name else line)
        except PackageNotFoundError:
            yield f"a library is not installed: {line}", f"pip install '{line}'"


def _start_jax(environ: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    """JAX's platform and devices, or the problem that prevents it from starting."""
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
        return {}, (
            f"JAX did not start within {_PATIENCE_S:g} s",
            "end the process that holds the devices, or use JAX_PLATFORMS=cpu",
        )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
    named = [line for line in lines if "XLA_FLAGS" in line or "Error" in line]
    # Without the level, time and source line of XLA's log.
    reason = re.sub(r"^[A-Z]\d{4} .*?\] ", "", (named or lines)[-1])
    return {}, (
        f"JAX cannot start: {reason}",
        "correct XLA_FLAGS and JAX_PLATFORMS, or reinstall jax and its plugin",
    )


def _device_problems(
    devices: Sequence[Mapping[str, Any]], environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    accelerators = find_accelerators(environ)
    is_cpu = all(device["platform"] == "cpu" for device in devices)
    if accelerators and is_cpu:
        extra = "tpu" if accelerators[0] == "TPU" else "cuda12"
        yield (
            f"{len(accelerators)} × {accelerators[0]} is here, and JAX uses the CPU",
            f"install JAX's plugin: pip install 'tessera-spmd[{extra}]'",
        )
    text = environ.get("PJRT_NPROC", "")
    threads = int(text) if text.isdecimal() else 0
    if is_cpu and len(devices) > 1 and threads < 32:
        yield (
            f"{len(devices)} CPU devices can deadlock: PJRT_NPROC={text or 'unset'}",
            "export PJRT_NPROC=32",
        )


def _notes(devices: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is no problem of this machine, and good to know."""
    is_cpu = any(device["platform"] == "cpu" for device in devices)
    found = installed(["jaxlib"]).get("jaxlib", "")
    if is_cpu and found.startswith(_WRONG_ON_CPU):
        yield (
            f"jaxlib {found} computes wrong values on CPUs in some sums of products "
            "(jax-ml/jax#39103): Tessera compiles with an option that avoids it, "
            "jax.jit does not; JAX 0.11.2 needs none"
        )


def _cache_problems(folder: str | None) -> Iterator[tuple[str, str]]:
    if folder is None:
        return
    try:
        from tessera.train.runtime.compile_cache import open_compile_cache

        open_compile_cache(folder)
    except ImportError:
        return  # without JAX, which is a problem already
    except TesseraError as error:
        yield f"{error.what}: {error.got}", error.fix


def _links() -> str:
    """How GPUs are connected, as NVIDIA's driver shows it."""
    if shutil.which("nvidia-smi") is None:
        return "not visible: there is no nvidia-smi here"
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not visible: {error}"
    return done.stdout.strip() or f"not visible: {done.stderr.strip()}"


def _folder_bytes(folder: str | None) -> int | None:
    if folder is None or "://" in folder:
        return None
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


def _device_line(device: Mapping[str, Any]) -> str:
    size = device["memory_bytes"]
    memory = f", {size / 2**30:.1f} GiB" if size else ", memory not visible"
    return f"{device['platform'].upper()}: {device['kind']}{memory}"
