# SPDX-License-Identifier: Apache-2.0
"""What the commands that use a trained model share: options, output, coded errors."""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tessera.train.runtime.exit_codes import shows_errors

if TYPE_CHECKING:
    from tessera.mesh import Mesh
    from tessera.train.loop.trained_model import TrainedModel


def model_parser(name: str, description: str | None) -> ArgumentParser:
    """A parser of the options that say which model, and where it runs."""
    parser = ArgumentParser(
        f"tessera {name}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a run, its checkpoints, one of them, or a folder")
    add("--module", action="append", default=[], help="imported first; repeatable")
    add("--mesh", help="sizes and axes, such as [[1,4],[fsdp,tp]]; one device")
    return parser


def open_model(options: Namespace) -> "tuple[TrainedModel, Mesh | None]":
    """The model of the command line, and its mesh with devices."""
    # Here, because it imports JAX: --help and wrong options do not wait for it.
    from tessera.train.loop.trained_model import mesh_of, open_trained

    mesh = mesh_of(options.mesh)
    return open_trained(options.model, options.module), mesh


@shows_errors
def run_command(
    parser: ArgumentParser,
    texts: Callable[[Namespace], Iterator[str]],
    arguments: Sequence[str] | None,
) -> int:
    """Write texts as they come; the exit code, that of a coded error if one is raised.

    Args:
      parser: The parser of the command line.
      texts: Called with its options.
      arguments: The command line; None takes the process's own.
    """
    # Options may stand between the model and the prompts.
    options = parser.parse_intermixed_args(arguments)
    for text in texts(options):
        sys.stdout.write(text)
        sys.stdout.flush()
    return 0
