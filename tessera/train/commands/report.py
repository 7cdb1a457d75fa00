# SPDX-License-Identifier: Apache-2.0
"""Write the report of a run, or of several compared, as one HTML file.

tessera report outputs/mine
tessera report outputs/mine outputs/other --output comparison.html
tessera report outputs/mine --watch 30

Without --output it is report.html in the folder of the first run.
"""

import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from tessera.train.runtime.exit_codes import shows_errors


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report that the command line asks for; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _write(options)
    except KeyboardInterrupt:  # how one ends --watch
        return 0 if options.watch is not None else 130
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "tessera report",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="run", help="the folder of a run")
    add("--output", type=Path, metavar="FILE", help="the HTML file")
    add(
        "--watch",
        type=_seconds,
        metavar="SECONDS",
        help="write it again and again, until Ctrl-C; the page reloads itself",
    )
    return parser


def _seconds(text: str) -> float:
    if not 1 <= (seconds := float(text)) <= 86_400:
        raise ValueError
    return seconds


def _write(options: Namespace) -> None:
    from tessera.train.report.page import write_report

    output = options.output or options.runs[0] / "report.html"
    while True:
        write_report(options.runs, output, every=options.watch)
        sys.stdout.write(f"{output}\n")
        sys.stdout.flush()
        if options.watch is None:
            return
        time.sleep(options.watch)
