# SPDX-License-Identifier: Apache-2.0
"""Choose the mesh and the settings of a run for a machine that need not be here.

tessera plan model=gemma3_4b runtime.target=h100:2x8 training.global_batch_size=512
tessera plan --json=plan.json model=gemma3_1b ...

The settings are those of `tessera train`; what they set is not searched.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from tessera.train.commands.command_parser import CommandParser
from tessera.train.commands.output_file import check_output
from tessera.train.runtime.exit_codes import shows_errors


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan that the command line asks for; the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    options, unknown = _parser().parse_known_intermixed_args(words)
    if unknown:
        from tessera.train.config.help_text import setting_paths
        from tessera.train.config.setting_hints import unknown_flags

        raise unknown_flags(unknown, words, setting_paths())
    sys.stdout.write(_plan(options))
    return 0


def _parser() -> ArgumentParser:
    parser = CommandParser("tessera plan", __doc__)
    add = parser.add_argument
    add("words", nargs="*", metavar="setting=value", help="as of tessera train")
    add("--module", action="append", default=[], help="imported first; repeatable")
    add("--rows", type=_count, default=10, metavar="N", help="layouts to show")
    add("--json", type=Path, metavar="FILE", help="write everything here")
    add(
        "--goodput",
        nargs=2,
        type=_positive,
        metavar=("BYTES/S", "SECONDS"),
        help="of a run that failures interrupt: the rate at which all hosts together "
        "write a checkpoint, and the time from a failure to the next step",
    )
    return parser


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError
    return number


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError
    return number


def _plan(options: Namespace) -> str:
    if options.json is not None:
        check_output("the plan", options.json)
    # Here, because it imports JAX: --help and wrong options do not wait for it.
    from tessera.train.planner.plan_run import plan_run
    from tessera.train.runtime.devices import prepare_devices

    prepare_devices(1, "cpu")
    answer = plan_run(
        options.words,
        modules=options.module,
        rows=options.rows,
        note=lambda text: sys.stderr.write(f"… {text}\n"),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(answer.as_json(), indent=2) + "\n")
    text = f"{answer.as_text(options.rows)}\n"
    if options.goodput is not None:
        text += f"\n{answer.goodput_text(*options.goodput)}\n"
    return text
