# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's tests under Tessera, and compares the outcomes with a table.

    python -m tests.jax_tests .../jax-0.10.2/tests [--replace grad] [--write]

A test that fails with JAX's own function as well, in the same environment, does not
count.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from tests.jax_tests.differences import Table, news, read_record, write_record
from tests.jax_tests.outcomes import Outcome

HERE = Path(__file__).parent


def main() -> str | None:
    """What is wrong, if anything."""
    arguments, others = _parser().parse_known_args()
    path = HERE / f"differences-{arguments.replace}.toml"
    table = Table.read(path)
    if table.jax != jax.__version__:
        return f"{path.name} is of JAX {table.jax}, and {jax.__version__} is installed"
    with tempfile.TemporaryDirectory(prefix="tessera-jax-tests-") as folder:
        outcomes = _outcomes(arguments, table, others, Path(folder))
    if not outcomes:
        return f"no test ran in {arguments.folder}"
    lines = news(table, outcomes)
    sys.stdout.write("\n".join([*lines, _counts(outcomes), ""]))
    if arguments.write:
        table.updated(outcomes).write(path)
    elif lines:
        return f"{path.name} is wrong about {len(lines)} tests; --write mends it"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.jax_tests", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of JAX's tests")
    parser.add_argument("--replace", default="jit", choices=["jit", "grad"])
    parser.add_argument("--files", nargs="+", help="some of the table's files")
    parser.add_argument("--write", action="store_true", help="write the table anew")
    return parser


def _outcomes(
    arguments: argparse.Namespace, table: Table, others: list[str], folder: Path
) -> dict[str, Outcome]:
    """The outcomes, without what is news and fails with JAX's own functions too."""
    asked = arguments.files or [*table.files, *table.sampled]
    found = dict[str, Outcome]()
    for files, cases in ((table.files, None), (table.sampled, "1")):
        chosen = [arguments.folder.resolve() / name for name in asked if name in files]
        if chosen:
            run = _Run(arguments, chosen, others, folder, cases)
            found |= run.outcomes(table)
    return found


@dataclass(frozen=True)
class _Run:
    """One run of some files, with a number of drawn cases of each test."""

    arguments: argparse.Namespace
    files: Sequence[Path]
    others: Sequence[str]
    folder: Path
    cases: str | None

    def outcomes(self, table: Table) -> dict[str, Outcome]:
        """The outcomes of the files."""
        record, of_jax = self.folder / "record", self.folder / "of-jax"
        record.unlink(missing_ok=True)
        self._run("--replace", self.arguments.replace, "--record", record)
        outcomes = read_record(record) if record.exists() else {}
        if new := table.unlisted(outcomes):
            write_record(record, new)
            again = ["--failed-in", record, "--record", of_jax]
            self._run("--replace", "nothing", *again)
            fails = {test for test, o in read_record(of_jax).items() if o.differs}
            outcomes = {test: o for test, o in outcomes.items() if test not in fails}
        return outcomes

    def _run(self, *options: str | Path) -> None:
        tests = self.arguments.folder.resolve()
        pytest = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", tests]
        pytest += ["-p", "tests.jax_tests.replace_jit", "-p", "no:cacheprovider"]
        pytest += ["-q", "--tb=no", "-r", "", "-n", "2", *self.files, *self.others]
        cases = {"JAX_NUM_GENERATED_CASES": self.cases} if self.cases else {}
        subprocess.run([*pytest, *options], check=False, env=os.environ | cases)


def _counts(outcomes: dict[str, Outcome]) -> str:
    reached = [outcome for outcome in outcomes.values() if outcome.reached]
    differ = sum(outcome.differs for outcome in outcomes.values())
    return (
        f"{len(outcomes)} tests ran, {len(reached)} of them called what is replaced, "
        f"{differ} differ"
    )


if __name__ == "__main__":
    sys.exit(main())
