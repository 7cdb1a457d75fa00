# SPDX-License-Identifier: Apache-2.0
"""The weights of a run as a safetensors file, or a folder for Transformers or PEFT.

tessera export outputs/mine weights.safetensors --dtype=bf16
tessera export outputs/mine folder --format=hf
tessera export outputs/mine adapters --format=peft
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from tessera.errors import OutputPathError, shows_errors


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Export what the command line asks for; the exit code."""
    parser = ArgumentParser("tessera export", description=__doc__)
    parser.add_argument("checkpoint", help="a run, its checkpoints, or one of them")
    parser.add_argument("file", help="where to, such as weights.safetensors")
    parser.add_argument(
        "--format",
        choices=("safetensors", "hf", "peft"),
        default="safetensors",
        help="hf makes a folder that Hugging Face Transformers loads, with adapters "
        "merged into the weights; peft makes one of the adapters alone",
    )
    parser.add_argument("--dtype", choices=("f32", "bf16", "f16"), help="round to it")
    options = parser.parse_args(arguments)
    _check_file(options.file, is_folder=options.format != "safetensors")
    size = _export(options)
    path = options.file.encode(errors="backslashreplace").decode()
    sys.stdout.write(f"{path}: {size}\n")
    return 0


def _export(options: Namespace) -> str:
    """Write the file; its size in words."""
    # Here, because they import JAX: problems with the file are reported before that.
    from tessera.analysis.memory import format_bytes
    from tessera.train.checkpoints.export_checkpoint import export_checkpoint

    file = options.file
    try:
        size = export_checkpoint(
            options.checkpoint, file, dtype=options.dtype, kind=options.format
        )
    except OSError as error:
        raise _cannot_write(file, error.strerror or str(error)) from error
    return format_bytes(size)


def _check_file(file: str, *, is_folder: bool) -> None:
    """Check that a file can be put there, and that nothing but a file would go."""
    if not Path(file).name or "\0" in file:
        raise _cannot_write(file, "it names no file")
    try:
        is_file = Path(file).is_file() or is_folder
        if os.path.lexists(file) and not is_file:
            raise _cannot_write(file, "it is there, and it is no regular file")
        if not Path(file).absolute().parent.is_dir():
            raise _cannot_write(file, "its folder does not exist")
    except OSError as error:
        raise _cannot_write(file, error.strerror or str(error)) from error


def _cannot_write(file: str, why: str) -> OutputPathError:
    return OutputPathError(
        "the weights cannot be written",
        got=f"{file!r}: {why}",
        fix="name a file in a folder that is there and that has room for it",
    )
