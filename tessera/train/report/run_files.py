# SPDX-License-Identifier: Apache-2.0
"""Reads what the folder of a run says, also of one that is killed or going on.

Every file may be missing, and a line may be cut: what cannot be read is counted, and
the report says so. Of a step that ``metrics.jsonl`` has twice, the last value counts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from tessera.errors import OutputPathError
from tessera.train.files.bounded_yaml import parse_yaml
from tessera.train.files.regular_files import check_regular, read_regular
from tessera.train.records.events import Event, read_events
from tessera.train.report.samples_file import Samples, read_samples

Series: TypeAlias = Mapping[int, float]
"""Values of a metric by step, in the order of steps."""

_LONGEST_LINE: Final = 2**20
_LONGEST_FILE: Final = 2**26
_FILES: Final = ("metrics.jsonl", "events.jsonl", "config.yaml")


@dataclass(frozen=True)
class RunFiles:
    """What the folder of a run says.

    Attributes:
      name: What the report calls the run.
      series: Each metric.
      events: What happened, over all attempts.
      settings: The values of ``config.yaml``, by dotted path.
      problems: What could not be read.
      samples: Completions and their rewards.
    """

    name: str
    series: Mapping[str, Series] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    samples: Samples = field(default_factory=Samples)

    def of_kind(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    def program(self, part: str) -> dict[str, str]:
        """A table that the last attempt logged: what it was to do, or what it compiled.

        Args:
          part: ``run`` or ``rows``; a name may have several rows.
        """
        table = dict[str, str]()
        for event in self.of_kind("program")[-1:]:
            for name, value in event.get(part, ()):
                table[name] = f"{table[name]}; {value}" if name in table else value
        return table


def read_run(path: Path, name: str | None = None) -> RunFiles:
    """Read the folder of a run.

    Args:
      path: The folder.
      name: What the report calls the run; None is its path.

    Raises:
      OutputPathError: [T504] it is not the folder of a run.
    """
    if not any((path / name).exists() for name in _FILES):
        raise OutputPathError(
            "there is no run to report on",
            got=f"{str(path)!r}, which has none of {', '.join(_FILES)}",
            fix="name the folder of a run, as outputs/tiny/2026-11-26/12-00-00",
        )
    problems: list[str] = []
    return RunFiles(
        name=str(path) if name is None else name,
        series=_read_metrics(path / "metrics.jsonl", problems),
        events=_events(path / "events.jsonl", problems),
        settings=dict(_walk(_read_settings(path / "config.yaml", problems))),
        samples=_samples(path / "samples.jsonl", problems),
        problems=tuple(problems),
    )


def _events(path: Path, problems: list[str]) -> tuple[Event, ...]:
    try:
        if path.exists():
            check_regular(path)
        events = read_events(path)
        return tuple(one for one in events if isinstance(one.get("time"), int | float))
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
        return ()


def _read_metrics(path: Path, problems: list[str]) -> dict[str, Series]:
    """Each metric by step; the steps are sorted."""
    series: dict[str, dict[int, float]] = {}
    bad = 0
    try:
        for line in _lines(path):
            try:
                values = json.loads(line)  # strictness would take half of the time
                step = values.pop("step")
                if type(step) is not int:
                    raise ValueError
                for name, value in values.items():
                    series.setdefault(name, {})[step] = float(value)
            except Exception:  # also a number of hundreds of digits
                bad += 1
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
    if bad:
        problems.append(f"{path.name}: {bad} lines that are cut or not numbers")
    return {name: dict(sorted(values.items())) for name, values in series.items()}


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        check_regular(path)
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                yield line


def _samples(path: Path, problems: list[str]) -> Samples:
    try:
        return read_samples(path, problems)
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
        return Samples()


def _read_settings(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """The mapping of a YAML file; an empty one where it holds none."""
    if not path.exists():
        return {}
    try:
        value = parse_yaml(read_regular(path, _LONGEST_FILE).decode())
        if not isinstance(value, dict):
            raise ValueError("it holds no mapping")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        problems.append(f"{path.name}: {reason or str(error).splitlines()[0]}")
        return {}
    return value


def _walk(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings, with its dotted path."""
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from _walk(value, name)
        else:
            yield name, value
