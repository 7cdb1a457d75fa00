# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of the run that a command line resumes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.train.files.bounded_yaml import parse_yaml
from tessera.train.loop.run_folder import CHECKPOINTS


def recorded_run(
    resume: str, output_dir: str | None
) -> tuple[Path, Mapping[str, Any]] | None:
    """The folder and ``config.yaml`` of a run; None if there is no record of it.

    Args:
      resume: ``training.resume``: the folder of the run, of its checkpoints or of one
        of them, ``auto`` for ``output_dir``, or ``none``.
      output_dir: The folder of the run that resumes, if it is known.
    """
    name = output_dir if resume == "auto" else resume
    if resume == "none" or not name:
        return None
    folder = Path(name).absolute()
    if folder.parent.name == CHECKPOINTS:  # one checkpoint
        folder = folder.parent
    if folder.name == CHECKPOINTS:
        folder = folder.parent
    try:
        settings = parse_yaml((folder / "config.yaml").read_text())
        is_run = "mesh_shape" in settings["model"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # the trainer says what is wrong with the folder
    return (folder, settings) if is_run else None
