# SPDX-License-Identifier: Apache-2.0
"""The weights of a run as a safetensors file.

python -m tessera.export outputs/mine weights.safetensors --dtype=bf16
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from tessera.analysis.memory import format_bytes
from tessera.errors import TesseraError
from tessera.training.checkpoints.exporting import export_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Export what the command line asks for; the exit code."""
    parser = ArgumentParser("python -m tessera.export", description=__doc__)
    parser.add_argument("checkpoint", help="a run, its checkpoints, or one of them")
    parser.add_argument("file", help="where to, such as weights.safetensors")
    parser.add_argument("--dtype", choices=("f32", "bf16", "f16"), help="round to it")
    given = parser.parse_args(arguments)
    try:
        nbytes = export_checkpoint(given.checkpoint, given.file, dtype=given.dtype)
    except (TesseraError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{given.file}: {format_bytes(nbytes)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
