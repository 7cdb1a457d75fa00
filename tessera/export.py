# SPDX-License-Identifier: Apache-2.0
"""The weights of a run as a safetensors file.

python -m tessera.export outputs/mine weights.safetensors --dtype=bf16
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tessera.errors import OutputPathError, TesseraError


def main(arguments: Sequence[str] | None = None) -> int:
    """Export what the command line asks for; the exit code."""
    parser = ArgumentParser("python -m tessera.export", description=__doc__)
    parser.add_argument("checkpoint", help="a run, its checkpoints, or one of them")
    parser.add_argument("file", help="where to, such as weights.safetensors")
    parser.add_argument("--dtype", choices=("f32", "bf16", "f16"), help="round to it")
    options = parser.parse_args(arguments)
    try:
        _check_file(options.file)
        size = _export(options.checkpoint, options.file, options.dtype)
    except TesseraError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    path = options.file.encode(errors="backslashreplace").decode()
    sys.stdout.write(f"{path}: {size}\n")
    return 0


def _export(checkpoint: str, file: str, dtype: str | None) -> str:
    """Write the file; its size in words."""
    # Here, because they import JAX: problems with the file are reported before that.
    from tessera.analysis.memory import format_bytes
    from tessera.training.checkpoints.export_checkpoint import export_checkpoint

    try:
        return format_bytes(export_checkpoint(checkpoint, file, dtype=dtype))
    except OSError as error:
        raise _cannot_write(file, error.strerror or str(error)) from error


def _check_file(file: str) -> None:
    """See that a file can be put there, and that nothing but a file would go."""
    if not Path(file).name or "\0" in file:
        raise _cannot_write(file, "it names no file")
    try:
        if os.path.lexists(file) and not Path(file).is_file():
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


if __name__ == "__main__":
    sys.exit(main())
