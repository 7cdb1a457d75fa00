# SPDX-License-Identifier: Apache-2.0
"""Write the report of a run, or of several compared, as one HTML file.

tessera report outputs/mine
tessera report outputs/mine outputs/other --output comparison.html

Without --output it is report.html in the folder of the first run.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tessera.train.commands.command_parser import CommandParser
from tessera.train.runtime.exit_codes import shows_errors


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report that the command line asks for; the exit code."""
    options = _parser().parse_args(arguments)
    # Here, because --help and wrong options do not wait for it.
    from tessera.train.report.page import write_report

    output = options.output or options.runs[0] / "report.html"
    write_report(options.runs, output)
    sys.stdout.write(f"{output}\n")
    return 0


def _parser() -> ArgumentParser:
    parser = CommandParser("tessera report", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="run", help="the folder of a run")
    add("--output", type=Path, metavar="FILE", help="the HTML file")
    return parser
