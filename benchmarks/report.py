# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: its arguments, its table, its JSON."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax

import tessera

Row: TypeAlias = dict[str, Any]
Item = TypeVar("Item")


def parser(description: str | None) -> argparse.ArgumentParser:
    """``--json PATH`` writes the figures, ``--quick`` takes under a minute."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", type=Path, help="write the same figures here")
    found.add_argument("--quick", action="store_true", help="under a minute")
    return found


def arguments(description: str | None) -> argparse.Namespace:
    """The arguments of a benchmark that has no others."""
    return parser(description).parse_args()


def environment() -> dict[str, Any]:
    """Hardware, versions and date, which every figure needs beside it."""
    packages = ("jax", "jaxlib", "flax", "optax")
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        **{name: importlib.metadata.version(name) for name in packages},
        "tessera": tessera.__version__,
    }


def processor() -> str:
    """The processor's model, and the width of its vectors, where Linux tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    fields = dict(
        (part.strip() for part in line.split(":", 1))
        for line in text.split("\n\n")[0].splitlines()
        if ":" in line
    )
    sets = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    vectors = [name for name in sets if name in fields.get("flags", "").split()]
    model = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return ", ".join([fields.get("model name", ""), model, *vectors])


def alternate(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each run, taken in turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    for index, run in in_turns([*enumerate(runs)], rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds[index].append(time.perf_counter() - start)
    return seconds


def in_turns(items: Sequence[Item], rounds: int) -> Iterator[Item]:
    """All items in each round, so that a slow minute slows all of them.

    The order is reversed in every other round: the second of a pair finds a cache
    that the first one filled.
    """
    for index in range(rounds):
        yield from items if index % 2 == 0 else reversed(items)


def spread(seconds: Sequence[float]) -> str:
    """Median with the middle half of the sample, in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle * 1e3:.2f} [{low * 1e3:.2f}, {high * 1e3:.2f}]"


def extremes(numbers: Sequence[float], digits: int) -> str:
    """The median, the least and the most."""
    found = (f(numbers) for f in (statistics.median, min, max))
    return "{} [{}, {}]".format(*(f"{each:.{digits}f}" for each in found))


def progress(what: str) -> None:
    """Say what is being measured, where it is no part of the tables."""
    print(f"… {what}", file=sys.stderr, flush=True)


def show(title: str, rows: Sequence[Row], path: Path | None) -> None:
    """Print the rows as a table and write them, with the environment, as JSON."""
    print_table(title, rows)
    _finish({"title": title}, {"rows": list(rows)}, path)


def show_all(tables: Mapping[str, Sequence[Row]], path: Path | None) -> None:
    """The same for several tables by title."""
    for title, rows in tables.items():
        print_table(title, rows)
        print()
    _finish({}, {"tables": {title: list(rows) for title, rows in tables.items()}}, path)


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print the rows, the columns being those of the first."""
    columns = list(rows[0])
    cells = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(title)
    for row in cells:
        line = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(line).rstrip())


def _finish(before: Row, after: Row, path: Path | None) -> None:
    known = environment()
    print(", ".join(f"{name} {value}" for name, value in known.items()))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = {**before, "environment": known, **after}
        path.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
