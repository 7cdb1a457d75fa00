# SPDX-License-Identifier: Apache-2.0
"""``Answer``: the layouts that the planner advises, as text and as JSON."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from tessera.analysis.memory import format_bytes
from tessera.analysis.tables import aligned, format_seconds
from tessera.targets.machine import HOST_BANDWIDTH
from tessera.targets.target import Target
from tessera.train.config.post_training_config import NEXT_TOKEN, POLICY
from tessera.train.config.recipes import RANDOM_WEIGHTS, tunes_nothing
from tessera.train.planner.goodput import goodput, seconds_between
from tessera.train.planner.layout import Layout, without
from tessera.train.planner.search import Candidate, SearchResult
from tessera.train.planner.search_space import Space
from tessera.train.planner.step_time import Prediction

UNCERTAINTY: Final = (
    "Times are predicted, not measured: those of published runs were met within 10 % "
    "at the median and 30 % at worst (benchmarks/planner_published.py)."
)
_WITHOUT_COMPILER: Final = (
    "The compiler of the target is not installed, so attention is traced as CPUs "
    "compute it, in thousands of small operations where the target may have one kernel "
    "(cuDNN, splash): steps come out too long and MFU too low, about 4 times for a "
    "small model at 2048 tokens and more for longer rows, and memory up to a tenth too "
    "low. Layouts are ranked by these times.\nFor good ones: "
)
_WITHOUT_BLOCKS: Final = (
    "\nThe model has no register_model(blocks=), so memory lacks what its layers keep "
    "for the backward pass: a layout may not fit."
)
_COLUMNS: Final = (
    *("rank", "layout", "step", "compute", "exposed", "bubble", "overhead"),
    *("memory", "of device", "tokens/s", "MFU", "memory is"),
)
# Reasons why layouts are not legal that are shown; the text of most has numbers.
_REASONS: Final = 5
_HIDDEN: Final = ("runtime.target", "runtime.target_compiler", "training.dry_run")


@dataclass(frozen=True)
class Answer:
    """What was asked, looked at and found.

    Attributes:
      target: The machine.
      space: What could be chosen.
      words: The command line of the run, which the overrides of a layout are added to.
      found: What the search ranked.
      state_bytes: Of a checkpoint.
    """

    target: Target
    space: Space
    words: tuple[str, ...]
    found: SearchResult
    state_bytes: float = 0.0

    @property
    def ranked(self) -> list[Candidate]:
        """The layouts that fit, best first.

        Those that surely fit are ranked by time, the others behind them by memory.
        """
        return sorted(self.found.best, key=_rank)

    @property
    def best(self) -> Candidate:
        """The layout to use."""
        return self.ranked[0]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        length = self.space.config.training.sequence_length
        return self.space.global_batch_size * length

    @property
    def uncertainty(self) -> str:
        """How good the estimates are."""
        text = f"{_WITHOUT_COMPILER}{self.target.installation}"
        if self.target.is_installed:
            text = UNCERTAINTY
        return text if self.space.has_blocks else text + _WITHOUT_BLOCKS

    def command(self, layout: Layout) -> str:
        """A command line that trains in a layout."""
        overrides = layout.overrides()
        changed = [word.partition("=")[0] for word in overrides]
        kept = without(self.words, *_HIDDEN, *changed)
        return shlex.join(["tessera", "train", *kept, *overrides])

    def as_text(self, rows: int = 10) -> str:
        """The answer for a terminal.

        Args:
          rows: How many layouts to show.
        """
        return "\n".join(self._lines(rows))

    def _lines(self, rows: int) -> Iterator[str]:
        config, machine = self.space.config, self.target.machine
        yield (
            f"{config.model.name} on {self.target.name}: {self.target.num_devices} "
            f"devices of {format_bytes(machine.memory_bytes)}; "
            f"{self.space.global_batch_size} sequences of "
            f"{config.training.sequence_length} tokens a step"
        )
        if "training.global_batch_size" not in self.space.pinned:
            yield (
                "training.global_batch_size is not set: it is what all devices have "
                "with training.micro_batch_size sequences each"
            )
        yield from self._counts()
        yield ""
        shown = self.ranked[:rows]
        cells = [self._cells(rank + 1, each) for rank, each in enumerate(shown)]
        yield aligned(_COLUMNS, cells, right=(*_COLUMNS[2:11],))
        yield from self._phases()
        yield ""
        yield self.uncertainty
        yield ""
        yield self.command(self.best.layout)
        if tunes_nothing(config):
            yield f"As planned, {RANDOM_WEIGHTS}"

    def goodput_text(self, write_rate: float, restart: float) -> str:
        """The goodput of a run with the failures of Llama 3, in a sentence.

        Args:
          write_rate: Bytes per second that all hosts write together.
          restart: Seconds from a failure to the next step.
        """
        devices, write = self.target.num_devices, self.state_bytes / write_rate
        between = seconds_between(devices)
        # The loop waits while each device of one replica copies its part to the host.
        sizes = self.best.layout.sizes
        parts = devices / sizes.get("dp", 1) / sizes.get("cp", 1)
        wait = self.state_bytes / parts / HOST_BANDWIDTH
        step = self.best.prediction.seconds
        found = goodput(between, wait, write, restart, step)
        size, count = format_bytes(round(self.state_bytes)), found.interval / step
        return (
            f"goodput {found.share:.1%}, were failures those of Llama 3 (419 in 54 "
            f"days on 16,384 GPUs), one in {format_seconds(between)} here, with "
            f"training.checkpoint_every={round(count)}: {size}, complete after "
            f"{format_seconds(write)}; lost to restarts {found.restarting:.1%}, to "
            f"repeated steps {found.repeating:.1%}, to waiting for checkpoints "
            f"{found.writing:.1%}"
        )

    def _counts(self) -> Iterator[str]:
        found = self.found
        yield (
            f"looked at {found.looked_at:,} layouts: {found.too_large:,} need more "
            "memory than a device has"
        )
        shown = found.rejected.most_common(_REASONS)
        for (code, what), count in shown:
            yield f"not legal: {count:,} times [{code}] {what}"
        if others := found.rejected.total() - sum(count for _, count in shown):
            yield f"not legal: {others:,} times for other reasons"

    def _phases(self) -> Iterator[str]:
        """What of the time of the best layout each phase takes."""
        found, objective = self.best.prediction, self.space.config.training.objective
        if objective == NEXT_TOKEN:
            return
        others = sum(found.phases.values())
        phases = {"step": found.seconds - others, **found.phases}
        shares = (f"{n} {100 * of / found.seconds:.0f} %" for n, of in phases.items())
        yield f"rank 1: {', '.join(shares)} of the time"
        if objective == POLICY:
            lacks = "rewards" if "decoding" in phases else "rollouts and rewards"
            yield f"with the longest prompts and completions, and no time of {lacks}"

    def _cells(self, rank: int, candidate: Candidate) -> list[str]:
        found, capacity = candidate.prediction, self.target.machine.memory_bytes
        parts = (found.compute, found.exposed, found.bubble, found.overhead)
        return [
            str(rank),
            describe(candidate.layout),
            format_seconds(found.seconds),
            *map(format_seconds, parts),
            format_bytes(found.memory_bytes),
            f"{100 * found.memory_bytes / capacity:.0f} %",
            f"{self.tokens / found.seconds:,.0f}",
            f"{100 * self.utilization(found):.0f} %",
            "estimated" if candidate.is_safe else "estimated, close to the limit",
        ]

    def utilization(self, prediction: Prediction) -> float:
        """Model FLOP utilization: model FLOPs over those at the devices' peak."""
        computation = self.space.config.training.precision.computation
        dtype = "float32" if computation == "float32" else "bfloat16"
        peak = self.target.machine.flops[dtype] * self.target.num_devices
        return prediction.flops / prediction.seconds / peak

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data for ``json.dumps``; seconds and bytes."""
        return {
            "target": self.target.name,
            "devices": self.target.num_devices,
            "global_batch_size": self.space.global_batch_size,
            "tokens": self.tokens,
            "looked_at": self.found.looked_at,
            "too_large": self.found.too_large,
            "rejected": [
                {"code": code, "what": what, "count": count}
                for (code, what), count in self.found.rejected.items()
            ],
            "command": self.command(self.best.layout),
            "layouts": [self._json(each) for each in self.ranked],
            "uncertainty": self.uncertainty,
        }

    def _json(self, candidate: Candidate) -> dict[str, Any]:
        found = candidate.prediction
        return {
            "layout": asdict(candidate.layout),
            "overrides": candidate.layout.overrides(),
            "seconds": found.seconds,
            **asdict(found),
            "is_safe": candidate.is_safe,
            "tokens_per_second": self.tokens / found.seconds,
            "mfu": self.utilization(found),
        }


def describe(layout: Layout) -> str:
    """A layout in a few words.

    Example:
      >>> describe(Layout((("fsdp", 8), ("tp", 2)), 4, 2, remat="full"))
      'fsdp 8 × tp 2, 2 microbatches of 4, remat full'
    """
    return ", ".join(_words(layout))


def _words(layout: Layout) -> Iterator[str]:
    yield " × ".join(f"{name} {size}" for name, size in layout.mesh)
    count, size = layout.microbatches, layout.micro_batch_size
    yield f"{count} microbatches of {size}" if count > 1 else f"microbatch of {size}"
    if layout.schedule:
        chunks = f" in {layout.chunks} chunks" if layout.chunks > 1 else ""
        yield f"{layout.schedule}{chunks}"
        if layout.gather == "step":
            yield "gathered once"
    yield f"remat {layout.remat}"
    if layout.zero_stage:
        yield f"ZeRO {layout.zero_stage}"
    if layout.sequence_parallel:
        yield "sequence parallel"
    if layout.offload:
        yield "optimizer on the host"
    if layout.loss_chunk != "auto":
        yield f"loss chunk {layout.loss_chunk}"


def _rank(candidate: Candidate) -> tuple[bool, float]:
    found = candidate.prediction
    risky = not candidate.is_safe
    return risky, found.memory_bytes if risky else found.seconds
