# SPDX-License-Identifier: Apache-2.0
"""The ``tessera`` command, whose subcommands are listed by ``tessera --help``.

    tessera train model=tiny training.steps=100
    tessera launch --nprocs=2 tessera train 'model.mesh_shape=[[2],[fsdp]]'

``python -m tessera`` is the same. A subcommand is imported once it is chosen, so that
``--help`` and ``--version`` import no JAX.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from tessera.errors import MissingLibraryError, UnknownSettingError, did_you_mean

# What the extra `train` installs, by the names that Python imports.
_OF_TRAINER = frozenset(
    {"flax", "grain", "hydra", "jaxtyping", "omegaconf", "optax", "orbax", "plotly"}
    | {"rich", "safetensors", "tensorboardX", "yaml"}
)

# Subcommand -> the module whose ``main(arguments)`` returns the exit code; its summary.
_COMMANDS = {
    "train": (
        "tessera.train.commands.train",
        "train a model; --help lists every setting",
    ),
    "launch": ("tessera.train.commands.launch", "start a program in several processes"),
    "export": (
        "tessera.train.commands.export",
        "write the weights of a run for others to load",
    ),
    "generate": (
        "tessera.train.commands.generate",
        "continue prompts with a trained model",
    ),
    "evaluate": (
        "tessera.train.commands.evaluate",
        "the perplexity of a trained model on text",
    ),
    "plan": ("tessera.train.commands.plan", "choose the layout of a run for a machine"),
    "calibrate": (
        "tessera.train.commands.calibrate",
        "measure this machine, as a target to plan for",
    ),
    "report": (
        "tessera.train.commands.report",
        "write what runs did as a page of HTML",
    ),
    "explain": ("tessera.errors.explain", "print the page of an error, such as T201"),
    "doctor": (
        "tessera.train.commands.doctor",
        "show versions, devices, and what is wrong",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("--help", "-h"):
        sys.stdout.write(_usage())
        return 0
    if name in ("--version", "-V"):
        from tessera.version import __version__

        sys.stdout.write(f"tessera {__version__}\n")
        return 0
    if name not in _COMMANDS:
        error = UnknownSettingError(
            f"tessera has no subcommand {name!r}",
            got=f"tessera {name}",
            fix=did_you_mean(name, _COMMANDS),
        )
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    module, _ = _COMMANDS[name]
    try:
        return import_module(module).main(words[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_TRAINER:
            raise
        missing = MissingLibraryError(
            f"tessera {name} needs the trainer, and a library of it is not installed",
            got=str(error),
            fix="run: pip install 'tessera-spmd[train]'",
        )
        sys.stderr.write(f"{missing}\n")
        return missing.exit_code


def _usage() -> str:
    lines = [f"  {name:9} {summary}\n" for name, (_, summary) in _COMMANDS.items()]
    return (
        "usage: tessera <subcommand> [argument ...]\n       tessera --version\n\n"
        + "".join(lines)
        + "\ntessera <subcommand> --help says more.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
