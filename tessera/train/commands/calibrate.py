# SPDX-License-Identifier: Apache-2.0
"""Measure the devices of this machine, and write them as a target to plan for.

tessera calibrate cluster.toml
tessera calibrate --cpu-devices=8 laptop.toml
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tessera.train.commands.output_file import (
    cannot_write,
    check_output,
    coded_errors,
)
from tessera.train.runtime.exit_codes import shows_errors

_MOST_DEVICES: Final = 2048  # what a process simulates


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write what the command line asks for; the exit code."""
    parser = ArgumentParser("tessera calibrate", description=__doc__)
    parser.add_argument("file", help="where to, such as cluster.toml")
    parser.add_argument(
        "--cpu-devices", type=_count, metavar="N", help="simulate so many CPU devices"
    )
    options = parser.parse_args(arguments)
    sys.stdout.write(_calibrate(Path(options.file), options.cpu_devices))
    return 0


def _count(text: str) -> int:
    if not 0 < (number := int(text)) <= _MOST_DEVICES:
        raise ValueError
    return number


def _calibrate(path: Path, cpu_devices: int | None) -> str:
    """Write the file; its name and content."""
    if path.suffix != ".toml":
        raise cannot_write("the target", path, "its name does not end with .toml")
    check_output("the target", path)
    from tessera.train.runtime.devices import prepare_devices

    prepare_devices(cpu_devices or 1, "cpu" if cpu_devices else "auto")
    from tessera.train.planner.calibration import calibrated, measure, write

    found = calibrated(measure(), path.stem)
    with coded_errors("the target", path):
        write(found, path)
    return f"{path}:\n\n{path.read_text(encoding='utf-8')}"
