# SPDX-License-Identifier: Apache-2.0
"""Installs what ``make gpu-wheels`` brought, on a machine without a network."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# Where one of these is missing, all wheels are installed. tokamax is no reason: its
# steps go without it.
NEEDED: Final = ("hydra", "omegaconf", "antlr4", "grain", "array_record")


def install_wheels(folder: Path, site: Path) -> tuple[str, ...]:
    """Install the wheels of a folder where they are missing; a path of modules.

    A failure is printed and stops nothing: some steps need none of them.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels or all(find_spec(name) for name in NEEDED):
        return ()
    if not (site / "hydra").exists():
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        command = [sys.executable, "-m", "pip", "install", *options]
        command += ["--target", str(site), *map(str, wheels)]
        if subprocess.run(command, check=False).returncode:
            print("the wheels were not installed", file=sys.stderr, flush=True)
            return ()
        _write_empty_xprof(site)
    return (str(site),)


def _write_empty_xprof(site: Path) -> None:
    """What tokamax imports of xprof, which it calls only to read profiles."""
    if find_spec("xprof") is None:
        tools = site / "xprof" / "cli" / "tools"
        tools.mkdir(parents=True, exist_ok=True)
        for package in (tools.parents[1], tools.parent, tools):
            (package / "__init__.py").touch()
        (tools / "get_kernel_stats_tool.py").touch()
