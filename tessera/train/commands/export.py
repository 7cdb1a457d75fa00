# SPDX-License-Identifier: Apache-2.0
"""The weights of a run as a safetensors file, or a folder for Transformers or PEFT.

tessera export outputs/mine weights.safetensors --dtype=bf16
tessera export outputs/mine folder --format=hf
tessera export outputs/mine adapters --format=peft
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tessera.train.commands.command_parser import CommandParser
from tessera.train.commands.output_file import DTYPE_NAMES, check_output, coded_errors
from tessera.train.runtime.exit_codes import shows_errors


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Export what the command line asks for; the exit code."""
    parser = CommandParser("tessera export", __doc__)
    parser.add_argument("checkpoint", help="a run, its checkpoints, or one of them")
    parser.add_argument("file", help="where to, such as weights.safetensors")
    parser.add_argument(
        "--format",
        choices=("safetensors", "hf", "peft"),
        default="safetensors",
        help="hf makes a folder that Hugging Face Transformers loads, with adapters "
        "merged into the weights; peft makes one of the adapters alone",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPE_NAMES,
        help="round to it; by default hf has that of the folder that the run began "
        "with, and the others f32",
    )
    options = parser.parse_args(arguments)
    is_folder = options.format != "safetensors"
    check_output("the weights", options.file, is_folder=is_folder)
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
    with coded_errors("the weights", file):
        size = export_checkpoint(
            options.checkpoint, file, dtype=options.dtype, kind=options.format
        )
    text = f"{format_bytes(size)}, {options.dtype or 'f32'}"
    if options.format == "hf":
        values = json.loads((Path(file) / "config.json").read_text())
        text = f"{format_bytes(size)}, {values['dtype']}"
        if options.dtype is None and values["dtype"] != "float32":
            text += " as the folder that the run began with; --dtype=f32 keeps all bits"
    return text
