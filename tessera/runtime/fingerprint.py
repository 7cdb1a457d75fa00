# SPDX-License-Identifier: Apache-2.0
"""What a rank says of itself where ranks meet: versions, code, devices.

All of it is found without JAX's backend, which may start only after the ranks have met.
"""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from tessera.runtime.accelerators import find_accelerators, share_of
from tessera.runtime.cluster import Cluster

# The libraries that decide which program is compiled and what its data are.
_LIBRARIES: Final = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "tessera")
_PACKAGE: Final = Path(__file__).parents[1]


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that a program depends on."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def code() -> dict[str, str]:
    """A fingerprint for each file of Tessera, and for the program that runs.

    Twelve hex digits of a SHA-256 for each: enough to tell two files apart, and to name
    those that differ.
    """
    files = {
        str(path.relative_to(_PACKAGE.parent)): path for path in _PACKAGE.rglob("*.py")
    }
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    # pip writes a script such as bin/tessera with the path of its environment inside.
    if program and Path(program).parent != Path(sysconfig.get_path("scripts")):
        files[Path(program).name] = Path(program)
    found: dict[str, str] = {}
    for name, path in sorted(files.items()):
        try:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        except OSError:
            continue  # another process is changing the installation
    return found


def devices(
    cluster: Cluster, platform_name: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """The kinds of this rank's devices, and how many.

    Args:
      cluster: The rank's place.
      platform_name: ``"cpu"`` is taken at its word: it needs no accelerator.
      environ: The environment variables.
    """
    found = find_accelerators(environ)
    if platform_name == "cpu" or not found:
        return {"kind": f"CPU, {platform.machine()}"}
    mine = share_of(cluster.local_rank, cluster.local_size, len(found))
    taken = found if mine is None else [found[number] for number in mine]
    kinds = sorted(set(taken))
    return {"kind": " and ".join(kinds), "count": str(len(taken))}
