# SPDX-License-Identifier: Apache-2.0
"""The accelerators of this machine, found without JAX.

JAX fixes what devices a process has when its backend starts, and before that several
processes have to agree on who takes which. What the drivers show of themselves in the
file system is enough for it.
"""

from collections.abc import Mapping
from pathlib import Path

# Variables that hide NVIDIA's or AMD's devices from a process.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def find_accelerators(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """A name for each accelerator that a process here can use: ``"NVIDIA H200"``.

    Args:
      environ: The process's environment variables.
      root: Where the file system begins.

    Returns:
      As many entries as devices; none where only the CPU is, or where JAX is told to
      take the CPU.
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
    """Those that the environment leaves visible."""
    for name in _VISIBLE:
        if name in environ:
            chosen = [part.strip() for part in environ[name].split(",")]
            # A device may be named by its UUID, which says nothing of its model here.
            numbers = [int(part) if part.isdecimal() else 0 for part in chosen if part]
            return [models[number] for number in numbers if number < len(models)]
    return models


def share_of(local_rank: int, num_local: int, num_devices: int) -> list[int] | None:
    """The devices of this machine that one of its processes takes.

    Args:
      local_rank: Which process of this machine.
      num_local: Processes on this machine.
      num_devices: Accelerators that the process can see.

    Returns:
      Device numbers; None takes all that there are, as a process does that is alone or
      that its scheduler shows its own devices only.

    Example:
      >>> share_of(1, 2, 8)
      [4, 5, 6, 7]
      >>> share_of(1, 4, 1) is None
      True
    """
    if num_local == 1 or num_devices < num_local:
        return None
    each = num_devices // num_local
    return list(range(local_rank * each, (local_rank + 1) * each))
