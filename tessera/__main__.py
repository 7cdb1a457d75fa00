# SPDX-License-Identifier: Apache-2.0
"""The ``tessera`` command, whose subcommands are listed by ``tessera --help``.

    tessera train model=tiny training.steps=100
    tessera launch --nprocs=2 train 'model.mesh_shape=[[2],[fsdp]]'

``python -m tessera`` is the same. A subcommand is imported once it is chosen, so that
``--help`` and ``--version`` import no JAX.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from tessera.errors import (
    MissingLibraryError,
    TesseraError,
    UnknownSettingError,
    did_you_mean,
)

# What the extra `train` installs, by the names that Python imports.
_OF_TRAINER = frozenset(
    {"flax", "grain", "hydra", "jaxtyping", "omegaconf", "optax", "orbax", "plotly"}
    | {"rich", "safetensors", "tensorboardX", "yaml"}
)

# What each subcommand does. Its module in ``train/commands`` has its name.
_COMMANDS = {
    "train": "train a model; --help lists every setting",
    "launch": "start a program in several processes",
    "export": "write the weights of a run for others to load",
    "push": "upload an exported folder to the Hugging Face Hub",
    "generate": "continue prompts with a trained model",
    "plan": "choose the layout of a run for a machine",
    "report": "write what runs did as a page of HTML",
    "explain": "print the page of an error, such as T201",
    "doctor": "show versions, devices, and what is wrong",
}

# What others call a subcommand, or look for.
_OTHERS = {
    "finetune fine-tune sft pretrain": "write tessera train model=... data=...",
    "eval evaluate lm_eval test": "write tessera train training.eval_only=true with "
    "model=<folder> or training.resume=<run>; tasks of lm_eval: python -m "
    "tessera.train.commands.lm_eval --help",
    "sample chat infer inference run predict": "write tessera generate <run or folder> "
    "'A prompt'; --chat answers it",
    "merge convert save": "write tessera export <run> <folder> --format=hf",
    "serve": "write tessera export <run> <folder> --format=hf; vllm serve <folder>",
    "upload": "write tessera push <exported folder> <your name>/<name>",
    "config": "write tessera train --print-config",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        sys.stdout.write(_usage())
        return 0
    if name in ("--version", "-V"):
        from tessera.version import __version__

        sys.stdout.write(f"tessera {__version__}\n")
        return 0
    try:
        return _run(name, words[1:])
    except TesseraError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _run(name: str, arguments: Sequence[str]) -> int:
    if name not in _COMMANDS:
        known = did_you_mean(name, _COMMANDS)
        if name.partition("=")[1]:
            known = f"write tessera train {name}"
        others = (to for names, to in _OTHERS.items() if name in names.split())
        raise UnknownSettingError(
            f"tessera has no subcommand {name!r}",
            got=f"tessera {name}",
            fix=next(others, known),
        )
    # The page of an error is printed without the trainer's libraries, too.
    folder = "tessera.errors" if name == "explain" else "tessera.train.commands"
    try:
        return import_module(f"{folder}.{name}").main(arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_TRAINER:
            raise
        raise MissingLibraryError(
            f"tessera {name} needs the trainer, and a library of it is not installed",
            got=str(error),
            fix="run: pip install 'tessera-spmd[train]'",
        ) from error


def _usage() -> str:
    lines = [f"  {name:9} {summary}\n" for name, summary in _COMMANDS.items()]
    return (
        "usage: tessera <subcommand> [argument ...]\n       tessera --version\n\n"
        + "".join(lines)
        + "\ntessera <subcommand> --help says more.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
