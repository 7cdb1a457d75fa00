# SPDX-License-Identifier: Apache-2.0
"""What the schedule of a pipeline costs: memory, idle time, time to compile."""

import statistics
import time
from dataclasses import replace

import jax
from modes import MODES
from report import Row, extremes, in_turns, progress
from runs import Runner, random_batch

from tessera.graph.compile_stages import Compiled
from tessera.mesh import Mesh
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import init_state
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.layer_scan import FULL, NAMED, NONE

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
FEW, MANY = 8, 64
SHALLOW, DEEP = 2, 8
REPEATS = 3
WIDTHS, STEPS = (256, 512), 5
ROWS, LENGTH, LONG = 4, 64, 256


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
    for name in SCHEDULES:
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
    and as much for the weights.
    """
    rows = []
    for name in SCHEDULES:
        for count in (FEW, MANY):
            schedule = MODES[name].step_config(count).schedule
            assert schedule is not None
            split = schedule.splits_backward
            bubble, work = schedule.stages - 1, schedule.chunks * count
            if split:
                bubble, work = 2 * bubble, 3 * work
            formula = bubble / (work + bubble)
            rows.append(
                {
                    "schedule": name,
                    "stages": schedule.stages,
                    "chunks": schedule.chunks,
                    "microbatches": count,
                    "ticks": schedule.ticks,
                    "counted": round(schedule.idle_fraction(), 6),
                    "formula": round(formula, 6),
                }
            )
    return rows


def compile_rows() -> list[Row]:
    """CPU seconds to compile, the median of some turns, against depth and number."""
    cases = [(FEW, SHALLOW), (FEW, DEEP), (MANY, SHALLOW)]
    rows = []
    for name in SCHEDULES:
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


def policy_rows() -> list[Row]:
    """CPU seconds of 1f1b on four stages, and of one device with as many microbatches.

    A pipeline of four devices that wait takes no more of them: simulated devices share
    the cores. All layers are on one device too, which stores what the policy says.
    """
    rows = []
    for width in WIDTHS:
        progress(f"policies at a width of {width}")
        policies = (NONE, NAMED, FULL)
        names = [(place, policy) for policy in policies for place in ("one", "1f1b")]
        runs = [_run(*name, width) for name in names]
        seconds: list[list[float]] = [[] for _ in runs]
        for index, run in in_turns([*enumerate(runs)], STEPS):
            begin = time.process_time()
            jax.block_until_ready(run())
            seconds[index].append(time.process_time() - begin)
        base = statistics.median(seconds[0])
        rows += [
            {
                "width": width,
                "remat": policy,
                "devices": "1" if place == "one" else "pp=4",
                "CPU s": extremes(each, 3),
                "ratio to one device, none": f"{statistics.median(each) / base:.3f}",
            }
            for (place, policy), each in zip(names, seconds, strict=True)
        ]
    return rows


def _run(place: str, policy: str, width: int) -> Runner:
    """A step that has run once, of eight layers and eight microbatches."""
    mode = MODES["1f1b"]
    config = mode.step_config(FEW)
    sizes = replace(mode.config(), d_model=width, mlp_dim=4 * width)
    split = config.model.split if place == "1f1b" else None
    model = DecoderModel(sizes, split=split, remat=policy)
    config = replace(config, model=model)
    if place == "one":
        mesh = Mesh(("dp",), devices=range(1), shape=(1,))
        config = replace(config, mesh=mesh, schedule=None)
    batch = random_batch(config, ROWS, LONG)
    state = init_state(config.model, config.optimizer, jax.random.key(0), config.mesh)
    run = Runner(make_train_step(config, state), state, batch)
    jax.block_until_ready(run())
    return run
