# SPDX-License-Identifier: Apache-2.0
"""The tables of JAX's tests that differ under Tessera, and why each does."""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.jax_tests.outcomes import Outcome

NOT_REVIEWED = "not reviewed: "


@dataclass(frozen=True)
class Group:
    """Tests that differ for one reason.

    Attributes:
      kind: The way in which they differ, as in ``Outcome``.
      reason: Why, in words.
      tests: Their names, ``file::class::test``.
    """

    kind: str
    reason: str
    tests: tuple[str, ...]

    def is_right(self, outcomes: Mapping[str, Outcome]) -> Callable[[str], bool]:
        """Whether a test did not run, or differs in this way."""
        return lambda test: test not in outcomes or outcomes[test].kind == self.kind


@dataclass(frozen=True)
class Table:
    """Every test that differs in some files of one version of JAX.

    Attributes:
      jax: The version.
      files: Files of which all tests run, with as many drawn cases as JAX draws.
      sampled: Files of thousands of tests, which run with one drawn case each.
      groups: The tests that differ.
    """

    jax: str
    files: tuple[str, ...]
    sampled: tuple[str, ...] = ()
    groups: tuple[Group, ...] = field(default=())

    @classmethod
    def read(cls, path: Path) -> "Table":
        content = tomllib.loads(path.read_text())
        groups = [
            Group(group["kind"], group["reason"], tuple(group["tests"]))
            for group in content.get("differences", [])
        ]
        files, sampled = content["files"], content.get("sampled", [])
        return cls(content["jax"], tuple(files), tuple(sampled), tuple(groups))

    @property
    def kinds(self) -> dict[str, str]:
        """The way in which each test differs."""
        return {test: group.kind for group in self.groups for test in group.tests}

    def unlisted(self, outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
        """The tests that differ and are not in the table, or in another way."""
        kinds = self.kinds
        return {
            test: outcome
            for test, outcome in outcomes.items()
            if outcome.differs and kinds.get(test) != outcome.kind
        }

    def updated(self, outcomes: Mapping[str, Outcome]) -> "Table":
        """The table after a run: without what passes, and with what is new."""
        new: dict[tuple[str, str], list[str]] = {}
        for test, outcome in self.unlisted(outcomes).items():
            why = f"{NOT_REVIEWED}{(outcome.why.splitlines() or [''])[0][:200]}"
            new.setdefault((outcome.kind, why), []).append(test)
        groups = [
            replace(group, tests=tuple(filter(group.is_right(outcomes), group.tests)))
            for group in self.groups
        ]
        groups += [Group(*key, tuple(tests)) for key, tests in new.items()]
        ordered = sorted(groups, key=lambda g: (g.kind, -len(g.tests), g.reason))
        return replace(self, groups=tuple(group for group in ordered if group.tests))

    def write(self, path: Path) -> None:
        """Write the table below the comment that the file begins with."""
        lines = path.read_text().splitlines() if path.exists() else []
        heading = [line for line in lines if line.startswith("#")]
        lines = [*heading, f"jax = {_quoted(self.jax)}", *_list("files", self.files)]
        lines += _list("sampled", self.sampled) if self.sampled else []
        for group in self.groups:
            lines += ["", "[[differences]]", f"kind = {_quoted(group.kind)}"]
            lines += [f"reason = {_quoted(group.reason)}"]
            lines += _list("tests", sorted(group.tests))
        path.write_text("\n".join(lines) + "\n")


def read_record(path: Path) -> dict[str, Outcome]:
    """The outcome of each test in a file that ``--record`` wrote."""
    fields = [json.loads(line) for line in path.read_text().splitlines()]
    return {entry.pop("test"): Outcome.of_json(entry) for entry in fields}


def write_record(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """One line of JSON for each test."""
    lines = [
        json.dumps({"test": test, **outcome.as_json()})
        for test, outcome in sorted(outcomes.items())
    ]
    path.write_text("".join(f"{line}\n" for line in lines))


def news(table: Table, outcomes: Mapping[str, Outcome]) -> list[str]:
    """One line for each test that the table is wrong about."""
    kinds = table.kinds
    lines = []
    for test, outcome in sorted(outcomes.items()):
        listed = kinds.get(test)
        if outcome.differs and listed != outcome.kind:
            where = f"listed as {listed}, is" if listed else "not listed:"
            lines.append(f"{test}: {where} {outcome.kind}: {outcome.why}")
        elif listed and not outcome.differs:
            lines.append(f"{test}: listed as {listed}, and {outcome.kind}")
    return lines


def _list(name: str, items: Iterable[str]) -> list[str]:
    return [f"{name} = [", *(f"  {_quoted(item)}," for item in items), "]"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
