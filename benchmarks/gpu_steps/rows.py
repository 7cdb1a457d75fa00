# SPDX-License-Identifier: Apache-2.0
"""What the steps share: rows kept as they come, clocks, compilation in threads."""

import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
# Set by the driver: where rows, files and scratch files go, and whether all is small.
ROWS: Final = os.environ.get("GPU_DAY_ROWS")
OUT: Final = Path(os.environ.get("GPU_DAY_OUT", "gpu_day"))
WORK: Final = Path(os.environ.get("GPU_DAY_WORK", "gpu_day/work"))
QUICK: Final = os.environ.get("GPU_DAY_QUICK") == "1"
_START: Final = time.perf_counter()


def emit(table: str, **row: Any) -> None:
    """Keep a row at once, as what follows may fail; ``at`` is the step's age."""
    row = {"table": table, "at": round(time.perf_counter() - _START, 1)} | row
    line = json.dumps(row, default=str, ensure_ascii=False)
    print("ROW", line, flush=True)
    if ROWS:
        with open(ROWS, "a") as file:
            file.write(line + "\n")


@contextmanager
def errors_kept(table: str, **known: Any) -> Iterator[None]:
    """An error within is a row of its own, and the step goes on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".strip()
        emit(table, **known, error=text[:300])


def is_gpu() -> bool:
    """Whether JAX computes on a GPU."""
    import jax

    return jax.default_backend() == "gpu"


def seconds_of(run: Callable[[], Any], times: int = 10, samples: int = 5) -> float:
    """Of one run: the median of samples of several runs in a row."""
    import jax

    if QUICK:
        times, samples = 2, 2
    jax.block_until_ready(run())
    jax.block_until_ready(run())
    found: list[float] = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(times - 1):
            run()
        jax.block_until_ready(run())
        found.append((time.perf_counter() - start) / times)
    return statistics.median(found)


class Compiler:
    """Compiles programs in threads.

    ``finish`` waits for all of them, so that nothing compiles while times are taken.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1 if QUICK else 4)

    def submit(self, function: Callable[..., Any], *arrays: Any) -> "Future[Any]":
        """The program of a function, some time later."""
        import jax

        return self._pool.submit(lambda: jax.jit(function).lower(*arrays).compile())

    def finish(self) -> None:
        """Wait for every program."""
        self._pool.shutdown(wait=True)


def relative_errors(results: Any, exact: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Of each array, in its norm, by name."""
    import numpy as np

    found = {}
    for name, result, true in zip(names, results, exact, strict=True):
        error = np.linalg.norm(np.asarray(result, np.float64) - true)
        found[name] = round(float(error / np.linalg.norm(true)), 7)
    return found


def gib(nbytes: float | None) -> float | None:
    """Bytes as GiB, to a hundredth."""
    return None if nbytes is None else round(nbytes / 2**30, 2)
