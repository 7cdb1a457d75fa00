# SPDX-License-Identifier: Apache-2.0
"""What the schedule of a pipeline costs: memory, idle time, time to compile."""

import statistics
import time

import jax
from modes import MODES
from report import Row, progress
from runs import random_batch

from tessera.graph.compile_stages import Compiled
from tessera.graph.pipelining.named_schedules import NAMES
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import init_state

FEW, MANY = 8, 64
SHALLOW, DEEP = 2, 8
REPEATS = 3
ROWS, LENGTH = 4, 64
# In units of a forward. The loop runs the stage anew in each backward.
RECOMPUTED, RECOMPUTED_SPLIT = 3.0, 2.0


def _compile(
    name: str, microbatches: int, depth: int | None = None
) -> tuple[Compiled, float]:
    """A mode's step for so many microbatches, and the CPU seconds to compile it.

    Tracing and lowering are in them, the making of the state is not. They are those of
    this process: they do not grow when others take the cores.
    """
    config = MODES[name].step_config(microbatches, depth)
    batch = random_batch(config, ROWS, LENGTH)
    state = init_state(config.model, config.optimizer, jax.random.key(0), config.mesh)
    jax.block_until_ready(state)
    begin = time.process_time()
    compiled = make_train_step(config, state).compile(state, batch)
    return compiled, time.process_time() - begin


def memory_rows() -> list[Row]:
    """Temporary bytes of a device at few and at many microbatches of the same size."""
    rows = []
    for name in NAMES:
        progress(f"memory of {name}")
        few, many = (
            _compile(name, count)[0].memory.temporaries for count in (FEW, MANY)
        )
        rows.append(
            {
                "schedule": name,
                f"{FEW} microbatches": few,
                f"{MANY} microbatches": many,
                "ratio": f"{many / few:.3f}",
            }
        )
    return rows


def idle_rows() -> list[Row]:
    """The share of time that devices wait, counted from the table that the loop reads.

    ``formula`` is that of the literature, with a backward of two forwards, or of one
    and as much for the weights; ``as executed`` counts the forward that is run anew.
    """
    rows = []
    for name in NAMES:
        for count in (FEW, MANY):
            schedule = MODES[name].step_config(count).schedule
            assert schedule is not None
            split = schedule.splits_backward
            bubble, work = schedule.stages - 1, schedule.chunks * count
            if split:
                bubble, work = 2 * bubble, 3 * work
            formula = bubble / (work + bubble)
            backward = RECOMPUTED_SPLIT if split else RECOMPUTED
            rows.append(
                {
                    "schedule": name,
                    "stages": schedule.stages,
                    "chunks": schedule.chunks,
                    "microbatches": count,
                    "ticks": schedule.ticks,
                    "counted": round(schedule.idle_fraction(), 6),
                    "formula": round(formula, 6),
                    "as executed": round(schedule.idle_fraction(backward=backward), 6),
                }
            )
    return rows


def compile_rows() -> list[Row]:
    """CPU seconds to compile, the median of some turns, against depth and number."""
    cases = [(FEW, SHALLOW), (FEW, DEEP), (MANY, SHALLOW)]
    rows = []
    for name in NAMES:
        progress(f"time to compile {name}")
        seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
        for _ in range(REPEATS):
            for case in cases:
                seconds[case].append(_compile(name, *case)[1])
        base, deep, many = (statistics.median(seconds[case]) for case in cases)
        rows.append(
            {
                "schedule": name,
                f"{FEW} microbatches, {SHALLOW} layers a stage": round(base, 2),
                f"{DEEP} layers": round(deep, 2),
                "layers ratio": f"{deep / base:.3f}",
                f"{MANY} microbatches": round(many, 2),
                "microbatches ratio": f"{many / base:.3f}",
            }
        )
    return rows
