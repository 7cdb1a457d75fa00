# SPDX-License-Identifier: Apache-2.0
"""Everything about Tessera on a GPU in one command, on a machine without a network.

A GPU comes at short notice and for minutes. Each step of ``gpu_steps/steps.py`` is a
process with its own limit; what it found before it failed or ran out of time is kept,
and the next step runs. Steps that judge correctness share the GPU, before anything is
timed.

    make gpu-wheels                              before, where there is a network
    python benchmarks/gpu_day.py --budget 530    there, in the root of the repository
    python benchmarks/gpu_day.py --steps trainer attention_time
    python benchmarks/gpu_day.py --quick         all of it, small, on a CPU
    python benchmarks/gpu_day.py --steps predict     predictions, without a GPU

``OUT`` (or ``--out``) gets ``results.json`` with every row, ``log.txt``, ``table.txt``,
and the files of some steps: a profile's trace, the text of a program. The table is
printed last.

The machine needs Python 3.12, JAX with its CUDA plugin, flax, optax and orbax, and for
their steps PyTorch and Transformers. What else Tessera's trainer needs is in ``.whl/``
(``make gpu-wheels``, listed in ``constraints/gpu-wheels.txt``) and is installed into a
folder of its own. tokamax is among these and optional: its package asks for xprof,
280 MB, only to read profiles, so an empty package of that name is put beside it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final

BENCHMARKS: Final = Path(__file__).resolve().parent
ROOT: Final = BENCHMARKS.parent
sys.path.insert(0, str(BENCHMARKS))

from gpu_steps.steps import STEPS, Step  # noqa: E402
from gpu_steps.wheels import install_wheels  # noqa: E402

QUICK_LIMIT: Final = 600.0
# Characters of the table that are printed; all of it is in table.txt.
MOST_PRINTED: Final = 10_000


@dataclass
class Result:
    """What a step found, and how it ended: ok, exit N, out of time, no time left."""

    name: str
    status: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Day:
    """Where results go, and how long all may take.

    Attributes:
      out: The folder of results.
      work: The folder of caches and scratch files, which a second call finds again.
      budget: Seconds for all steps.
      quick: Small, on a CPU, with generous limits.
      path: Entries of ``PYTHONPATH`` before its own.
    """

    out: Path
    work: Path
    budget: float
    quick: bool = False
    path: tuple[str, ...] = ()

    def environment(self, step: Step, rows: Path) -> dict[str, str]:
        """Of a step's process."""
        path = [*self.path, str(ROOT), str(BENCHMARKS)]
        path += [str(BENCHMARKS / "peer_programs"), os.environ.get("PYTHONPATH", "")]
        found = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "GPU_DAY_ROWS": str(rows),
            "GPU_DAY_OUT": str(self.out),
            "GPU_DAY_WORK": str(self.work),
            "GPU_DAY_QUICK": "1" if self.quick else "0",
            "JAX_COMPILATION_CACHE_DIR": str(self.work / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        if step.memory is None:
            found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        else:
            found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(step.memory)
        if self.quick:
            found |= {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "32"}
        elif step.shared:
            # Processes that autotune beside each other slow each other's compilation.
            flags = os.environ.get("XLA_FLAGS", "")
            found["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
        return dict(os.environ) | found


def run_step(step: Step, day: Day, left: float) -> Result:
    """Run a step in a process, within its limit and the time that is left."""
    if left < min(15.0, step.expected / 2):
        return Result(step.name, "no time left")
    rows = day.work / f"rows-{step.name}.jsonl"
    rows.unlink(missing_ok=True)
    start = time.monotonic()
    with open(day.work / f"log-{step.name}.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_steps", step.target],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=day.environment(step, rows),
            start_new_session=True,
        )
        try:
            code = process.wait(min(QUICK_LIMIT if day.quick else step.limit, left))
            status = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _kill_with_children(process)
    spent = round(time.monotonic() - start, 1)
    return Result(step.name, status, spent, _rows_of(rows))


def _kill_with_children(process: "subprocess.Popen[bytes]") -> None:
    """A step's own processes would keep the GPU's memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """Complete lines alone: a step may be killed while it writes one."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def run_steps(steps: Sequence[Step], day: Day) -> list[Result]:
    """All steps in order; shared ones that follow each other run at once."""
    begin = time.monotonic()
    (day.work / "cache").mkdir(parents=True, exist_ok=True)
    # The trainer refuses a cache that others may write to or read.
    (day.work / "cache").chmod(0o700)
    results: list[Result] = []

    def run(step: Step) -> None:
        result = run_step(step, day, day.budget - (time.monotonic() - begin))
        results.append(result)
        print(
            f"… {step.name}: {result.status}, {result.seconds} s, "
            f"{len(result.rows)} rows",
            flush=True,
        )
        _write_results(results, day)

    for shared, group in groupby(steps, lambda step: step.shared):
        if not shared or day.quick:
            for step in group:
                run(step)
            continue
        threads = [threading.Thread(target=run, args=(step,)) for step in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    _write_log(steps, day)
    return results


_WRITING = threading.Lock()


def _write_results(results: Sequence[Result], day: Day) -> None:
    with _WRITING:
        found = [vars(result) for result in results]
        text = json.dumps(found, indent=1, ensure_ascii=False)
        (day.out / "results.json").write_text(text + "\n")


def _write_log(steps: Sequence[Step], day: Day) -> None:
    with open(day.out / "log.txt", "w") as whole:
        for step in steps:
            path = day.work / f"log-{step.name}.txt"
            if path.exists():
                text = path.read_text(errors="replace")[-400_000:]
                whole.write(f"\n===== {step.name}\n{text}")


def table(results: Sequence[Result]) -> str:
    """A line for each step, then one for each row."""
    lines = [f"{r.name}: {r.status} {r.seconds or ''}".rstrip() for r in results]
    for result in results:
        lines += [_line(row) for row in result.rows]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    hidden = ("table", "at", "last")
    cells = (f"{k}={v}" for k, v in row.items() if k not in hidden and v is not None)
    return " ".join(f"{row['table']}: {' '.join(cells)}".split())[:300]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small, on a CPU")
    parser.add_argument("--budget", type=float, help="seconds for all of it")
    parser.add_argument("--steps", nargs="+", choices=names, metavar="STEP")
    parser.add_argument("--skip", nargs="+", choices=names, default=(), metavar="STEP")
    out = Path(os.environ.get("OUT", "outputs/gpu_day"))
    parser.add_argument("--out", type=Path, default=out, help="the folder of results")
    work = Path(tempfile.gettempdir()) / "tessera_gpu_day"
    parser.add_argument("--work", type=Path, default=work, help="caches and scratch")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Step]:
    """The steps of a command line, in the order of the table."""
    return [
        step
        for step in STEPS
        if (step.name in options.steps if options.steps else step.default)
        and step.name not in options.skip
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    begin = time.monotonic()
    out, work = options.out.resolve(), options.work.resolve()
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    path = install_wheels(ROOT / ".whl", work / "site")
    budget = options.budget or (3600.0 if options.quick else 530.0)
    left = budget - (time.monotonic() - begin)
    results = run_steps(chosen(options), Day(out, work, left, options.quick, path))
    text = table(results)
    (out / "table.txt").write_text(text)
    print(text[:MOST_PRINTED])
    if len(text) > MOST_PRINTED:
        print("… the rest is in table.txt")
    print(f"in all {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
