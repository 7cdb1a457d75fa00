# SPDX-License-Identifier: Apache-2.0
"""Builds the named pipeline schedules, and checks custom ones.

Idle times are for devices whose forward costs F = 1 and whose backward costs B = 2, or
B = 1 and W = 1 where it is split.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from tessera.errors import (
    PipelineSizeError,
    ScheduleError,
    UnknownScheduleError,
    did_you_mean,
    nearest_multiples,
)
from tessera.graph.pipelining.lock_steps import Placed, lock_steps
from tessera.graph.pipelining.schedule_legality import check
from tessera.graph.pipelining.schedule_table import (
    KINDS,
    Kind,
    Op,
    Placement,
    Schedule,
)


def schedule(
    name: str, stages: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """The schedule with a name.

    Args:
      name: "gpipe", "1f1b", "interleaved", "zero_bubble" or "dualpipev".
      stages: Devices along the pipeline.
      microbatches: Equal parts of the batch.
      chunks: Virtual stages on each device, for "interleaved"; by default 2.
        "dualpipev" has 2, and the others have 1.

    Raises:
      UnknownScheduleError: [T310] there is no such schedule.
      PipelineSizeError: [T311] a size is not a positive whole number, or the schedule
        cannot have it.

    Example:
      >>> schedule("interleaved", stages=4, microbatches=8).chunks
      2
    """
    if name not in NAMES:
        raise UnknownScheduleError(
            f"there is no pipeline schedule {name!r}", fix=did_you_mean(name, NAMES)
        )
    if name == "interleaved":
        return interleaved(stages, microbatches, 2 if chunks is None else chunks)
    if chunks not in (None, 2 if name == "dualpipev" else 1):
        has = "two chunks" if name == "dualpipev" else "one chunk"
        raise PipelineSizeError(
            f"the schedule {name!r} has {has} of layers per device",
            got=f"chunks={chunks!r}",
            fix="leave chunks out, or use the schedule 'interleaved'",
        )
    make = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zero_bubble": zero_bubble,
        "dualpipev": dualpipev,
    }[name]
    return make(stages, microbatches)


NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipev")


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    The backward mirrors the forward. Idle (S-1) / (M+S-1); every device stores the
    inputs of all microbatches at once.

    Raises:
      PipelineSizeError: [T311] a size is not a positive whole number.

    Example:
      >>> print(gpipe(stages=2, microbatches=2).as_text())
      gpipe: 2 stages, 2 microbatches, 6 ticks, idle 33.3 %
      tick     | 0  | 1  | 2  | 3  | 4  | 5
      device 0 | F0 | F1 |    |    | B1 | B0
      device 1 |    | F0 | F1 | B1 | B0 |
    """
    _checked_sizes(stages=stages, microbatches=microbatches)
    end = 2 * (microbatches + stages - 1) - 1
    placed: list[Placed] = []
    for m in range(microbatches):
        forward, backward = Op("F", m), Op("B", m)
        placed += [(m + s, s, forward) for s in range(stages)]
        placed += [(end - m - s, s, backward) for s in range(stages)]
    return _with_cells(Schedule("gpipe", stages, microbatches, 1, False, ()), placed)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward and one backward per tick (Narayanan et al. 2021, arXiv 2104.04473).

    Idle (S-1) / (M+S-1), as gpipe, but device s never stores more than 2(S-1-s)+1
    microbatches, however many there are.

    Raises:
      PipelineSizeError: [T311] a size is not a positive whole number.

    Example:
      >>> print(one_f_one_b(stages=2, microbatches=2).as_text())
      1f1b: 2 stages, 2 microbatches, 4 ticks, idle 33.3 %
      tick     | 0  | 1     | 2     | 3
      device 0 | F0 | F1    | B0    | B1
      device 1 |    | F0 B0 | F1 B1 |
    """
    _checked_sizes(stages=stages, microbatches=microbatches)
    empty = Schedule("1f1b", stages, microbatches, 1, False, ())
    return _with_cells(empty, _alternating(stages, microbatches, 1))


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1f1b over several chunks of layers per device (Narayanan et al. 2021).

    Microbatches go through in groups of as many as there are stages: a group through
    all first chunks, then through all second ones. Idle (S-1) / (v M+S-1), for v times
    the messages; a device's memory does not depend on the number of microbatches.

    Raises:
      PipelineSizeError: [T311] a size is not a positive whole number, or the
        microbatches are not a multiple of the stages while there are chunks.

    Example:
      >>> print(interleaved(stages=2, microbatches=2, chunks=2).as_text())
      interleaved: 2 stages, 2 chunks, 2 microbatches, 8 ticks, idle 20.0 %
      tick     | 0   | 1   | 2   | 3       | 4       | 5   | 6   | 7
      device 0 | F0a | F1a | F0b | F1b     | B0b     | B1b | B0a | B1a
      device 1 |     | F0a | F1a | F0b B0b | F1b B1b | B0a | B1a |
    """
    _checked_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    if chunks > 1 and microbatches % stages:
        raise PipelineSizeError(
            "interleaved chunks need a multiple of the stages as microbatches",
            got=f"{microbatches} microbatches, {stages} stages: "
            f"{microbatches} % {stages} = {microbatches % stages}",
            fix=f"use {nearest_multiples(stages, microbatches)} microbatches, or the "
            "schedule '1f1b'",
        )
    empty = Schedule("interleaved", stages, microbatches, chunks, False, ())
    return _with_cells(empty, _alternating(stages, microbatches, chunks))


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """1f1b whose weight gradients wait until every device has one to compute.

    The backward is split as by Qi et al. 2023 (arXiv 2401.10241): B is the gradient of
    a stage's input, W those of its weights. All devices do the W of microbatch m in the
    tick in which device 0 does its B, the last of them. So no tick is longer for a W
    that only some devices do: whatever F, B and W cost, the bubble is (S-1)(F+B), that
    of 1f1b without the W. The paper's ZB-H1 is for devices that run on as soon as they
    can; here devices go in lock-step, and it would wait longer than 1f1b.

    Raises:
      PipelineSizeError: [T311] a size is not a positive whole number.

    Example:
      >>> print(zero_bubble(stages=2, microbatches=2).as_text())
      zero_bubble: 2 stages, 2 microbatches, 4 ticks, idle 25.0 %
      tick     | 0  | 1     | 2        | 3
      device 0 | F0 | F1    | B0 W0    | B1 W1
      device 1 |    | F0 B0 | F1 B1 W0 | W1
    """
    _checked_sizes(stages=stages, microbatches=microbatches)
    ops = _alternating(stages, microbatches, 1)
    for m in range(microbatches):
        weight = Op("W", m)
        ops += [(m + 2 * (stages - 1), device, weight) for device in range(stages)]
    return _with_cells(Schedule("zero_bubble", stages, microbatches, 1, True, ()), ops)


def dualpipev(stages: int, microbatches: int) -> Schedule:
    """DualPipeV: two chunks in a "v", a forward beside a backward, weights in between.

    By DeepSeek (github.com/deepseek-ai/DualPipe) and Qi et al. 2025, from DualPipe,
    arXiv 2412.19437. A device waits for (S-1)(F&B + B+W - 3W) chunks, in which F&B is a
    forward with a whole backward beside it: where F, B and W take equally long, idle
    (S-1) / (3M+S-1). Where they do not, lock-step ticks wait longer. A device stores at
    most 2S+1 chunks, as much as S+1/2 of 1f1b's microbatches.

    Raises:
      PipelineSizeError: [T311] a size is not a positive whole number, or there are
        fewer microbatches than virtual stages.

    Example:
      >>> print(dualpipev(stages=1, microbatches=2).as_text())
      dualpipev: 1 stages, 2 chunks, 2 microbatches, 6 ticks, idle 0.0 %
      tick     | 0   | 1   | 2           | 3           | 4       | 5
      device 0 | F0a | F0b | F1a B0b W0b | F1b B0a W0a | B1b W1b | B1a W1a
    """
    _checked_sizes(stages=stages, microbatches=microbatches)
    if microbatches < 2 * stages:
        raise PipelineSizeError(
            "the schedule 'dualpipev' needs two microbatches for each stage",
            got=f"{microbatches} microbatches, {stages} stages",
            fix=f"use {2 * stages} microbatches or more, or another schedule",
        )
    empty = Schedule("dualpipev", stages, microbatches, 2, True, (), "v")
    orders = [_dualpipev_order(stages, microbatches, each) for each in range(stages)]
    return _with_cells(empty, lock_steps(empty, orders))


def _dualpipev_order(
    stages: int, microbatches: int, device: int
) -> Sequence[Sequence[Op]]:
    """The blocks of a device, in the eight steps of DeepSeek's program."""
    after, up_to = stages - 1 - device, device + 1
    blocks = ["Fa"] * (2 * after)
    blocks += ["Fa", "Fb"] * up_to
    blocks += ["Bb", "W", "Fb"] * after
    blocks += ["Fa Bb W", "Fb Ba W"] * (microbatches - 2 * stages + up_to)
    blocks += ["Bb W", "Fb Ba W"] * after
    drain = ["Bb", "Ba"] * up_to
    blocks += [f"{block} W" for block in drain[:up_to]] + drain[up_to:]
    blocks += ["W", "Ba"] * after
    blocks += ["W"] * up_to
    counts, waiting = Counter[str](), list[str]()

    def op(label: str) -> Op:
        """The next op of its kind; a W is that of the first B without one."""
        waiting.extend([label] * (label[0] == "B"))
        if label == "W":
            label += waiting.pop(0)[1]
        number = counts[label]
        counts[label] += 1
        return Op(cast("Kind", label[0]), number, "ab".index(label[1]))

    return [[op(label) for label in block.split()] for block in blocks]


def custom(
    cells: Iterable[Iterable[Iterable[Op]]],
    *,
    microbatches: int,
    chunks: int = 1,
    splits_backward: bool = False,
    placement: Placement = "loop",
    name: str = "custom",
) -> Schedule:
    """A custom schedule, if it is legal.

    Args:
      cells: ``cells[tick][device]``, the ops of that device in that tick.
      microbatches: Equal parts of the batch.
      chunks: Virtual stages on each device.
      splits_backward: Whether B leaves the gradients of weights to W.
      placement: Which virtual stages a device has: "loop", or "v" with two chunks.
      name: Its name; not that of a named schedule.

    Raises:
      ScheduleError: [T309] the table cannot be executed; with every reason.
      PipelineSizeError: [T311] a size is not a positive whole number.

    Example:
      >>> table = [[[Op("F", 0), Op("B", 0)]], [[Op("F", 1), Op("B", 1)]]]
      >>> custom(table, microbatches=2).ticks
      2
    """
    table = tuple(tuple(map(tuple, row)) for row in cells)
    if name in NAMES:
        raise ScheduleError(
            f"the name {name!r} belongs to another pipeline schedule",
            fix="give your table a name of its own",
        )
    stages = len(table[0]) if table else 0
    _checked_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    sizes = stages, microbatches, chunks
    result = Schedule(name, *sizes, splits_backward, table, placement)
    check(result)
    return result


def _checked_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PipelineSizeError(
                f"a pipeline's number of {name} is a positive whole number",
                got=f"{name}={size!r}",
                fix=f"use {name}=1 or more",
            )


def _with_cells(empty: Schedule, placed: Sequence[Placed]) -> Schedule:
    ticks = 1 + max(tick for tick, _, _ in placed)
    cells: list[list[list[Op]]]
    cells = [[[] for _ in range(empty.stages)] for _ in range(ticks)]
    for tick, device, op in sorted(
        placed, key=lambda entry: KINDS.index(entry[2].kind)
    ):
        cells[tick][device].append(op)
    return replace(empty, cells=tuple(tuple(map(tuple, row)) for row in cells))


def _alternating(stages: int, microbatches: int, chunks: int) -> list[Placed]:
    """1f1b, interleaved if there are several chunks: an F and a B in a steady tick."""
    placed: list[Placed] = []
    for step in range(microbatches * chunks):
        group, index = divmod(step, stages * chunks)
        # The last group is short only where there is one chunk, and is correct there.
        chunk = index // stages
        microbatch = group * stages + index % stages
        forward = Op("F", microbatch, chunk)
        backward = Op("B", microbatch, chunks - 1 - chunk)
        first_backward = stages * chunks - 1
        for device in range(stages):
            placed.append((step + device, device, forward))
            wait = first_backward + stages - 1 - device
            placed.append((step + wait, device, backward))
    return placed
