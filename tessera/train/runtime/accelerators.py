# SPDX-License-Identifier: Apache-2.0
"""Lists the accelerators of this machine without starting JAX.

JAX fixes a process's devices when its backend starts, and before that the processes of
a machine have to divide the accelerators. The files of their drivers are enough for it.
"""

from collections.abc import Mapping
from pathlib import Path

# Variables that hide NVIDIA's or AMD's devices from a process.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def find_accelerators(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """The model of each accelerator that a process here can use: ``"NVIDIA H200"``.

    Args:
      environ: The process's environment variables.
      root: The root of the file system.

    Returns:
      One entry for each device; empty if there is only the CPU, or if JAX is told to
      use the CPU.
    """
    if environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    models = [
        _model((gpu / "information").read_text(encoding="utf-8", errors="replace"))
        for gpu in sorted((root / "proc/driver/nvidia/gpus").glob("*"))
        if (gpu / "information").is_file()
    ]
    if not models and (root / "dev/kfd").exists():
        models = ["AMD GPU" for _ in (root / "dev/dri").glob("renderD*")]
    if models:
        return _visible(models, environ)
    return ["TPU" for _ in (root / "dev").glob("accel[0-9]*")]


def _model(information: str) -> str:
    for line in information.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return "NVIDIA GPU"


def _visible(models: list[str], environ: Mapping[str, str]) -> list[str]:
    """The devices that the environment leaves visible."""
    for name in _VISIBLE:
        if name in environ:
            entries = [part.strip() for part in environ[name].split(",")]
            # An entry may be a UUID, which does not tell the model.
            indices = [int(e) if e.isdecimal() else 0 for e in entries if e]
            return [models[index] for index in indices if index < len(models)]
    return models


def assign_devices(
    local_rank: int, num_local: int, num_devices: int
) -> list[int] | None:
    """The devices of this machine that one of its processes uses.

    Args:
      local_rank: The process's number on this machine.
      num_local: Processes on this machine.
      num_devices: Accelerators that the process can see.

    Returns:
      Device numbers; None for all that are visible, if the process is alone or its
      scheduler shows each process only its own devices.

    Example:
      >>> assign_devices(1, 2, 8)
      [4, 5, 6, 7]
      >>> assign_devices(1, 4, 1) is None
      True
    """
    if num_local == 1 or num_devices < num_local:
        return None
    each = num_devices // num_local
    return list(range(local_rank * each, (local_rank + 1) * each))
