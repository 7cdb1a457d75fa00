# SPDX-License-Identifier: Apache-2.0
"""The layouts that the planner looks at: meshes, and the settings that go with them."""

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tessera.errors import BatchSizeError, nearest
from tessera.foundations.device_grid import inferred
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.run_config import GATHERS, Config, data_parallel_groups
from tessera.train.planner.layout import SETTINGS, Layout

AXES: Final = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""Axes from the outermost to the innermost: those that send most are on fast links."""

MOST_MICROBATCHES: Final = 16
"""Microbatches for each stage of a pipeline, at which its bubble is 6 % of a step."""

REMAT: Final = ("none", "dots", "named", "full")
"""Policies of rematerialization, from the one that keeps most."""

_CHUNKS: Final = (2, 4)
_SMALL_LOSS_CHUNK: Final = 256

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Space:
    """What may be chosen for a run; whatever its command line sets stays as it is.

    Attributes:
      config: The settings of the run.
      pinned: The settings that its command line has, such as ``training.remat``.
      axes: Mesh axes that the model can use, outermost first.
      global_batch_size: Sequences of a step.
      has_blocks: Whether what the blocks of the model keep for the backward pass is
        known, and which policies of rematerialization they take.
      can_offload: Whether the memory of the host is another one than that of devices.
    """

    config: Config
    pinned: frozenset[str]
    axes: tuple[str, ...]
    global_batch_size: int
    has_blocks: bool = True
    can_offload: bool = True

    def meshes(self, num_devices: int) -> Iterator[Sizes]:
        """Every mesh of so many devices: one for each way to factor their number."""
        if "model.mesh_shape" in self.pinned:
            sizes, names = self.config.model.mesh_shape
            if -1 in sizes:
                sizes = inferred(names, sizes, num_devices)
            yield tuple(zip(names, sizes, strict=True))
            return
        for sizes in factorings(num_devices, len(self.axes)):
            mesh = zip(self.axes, sizes, strict=True)
            # A mesh has an axis, if only one of size 1.
            yield tuple(axis for axis in mesh if axis[1] > 1) or (("fsdp", 1),)

    def layouts(self, mesh: Sizes, micro_batch_size: int) -> list[Layout]:
        """The layouts with a microbatch, but for what only saves memory: variants."""
        sizes, training = dict(mesh), self.config.training
        has_stages = "pp" in sizes and sizes.get("fsdp", 1) > 1
        splits_heads = sizes.get("tp", 1) > 1
        options = itertools.product(
            self._schedules(sizes),
            self._choices("gather", GATHERS) if has_stages else ["microbatch"],
            self._choices("sequence_parallel", [False, True] if splits_heads else []),
        )
        return [
            Layout(
                mesh,
                micro_batch_size=micro_batch_size,
                microbatches=self.share(mesh) // micro_batch_size,
                offload=training.offload_optimizer,
                loss_chunk=training.loss_chunk,
                schedule=schedule,
                chunks=chunks,
                gather=gather,
                sequence_parallel=sequence,
            )
            for (schedule, chunks), gather, sequence in options
        ]

    @property
    def policies(self) -> Collection[Any]:
        """Policies of rematerialization, from the one that computes least again."""
        return self._choices("remat", REMAT)

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """A layout with more and more that saves memory, and mostly takes time.

        First by rematerialization, and for each policy by the stages of ZeRO; at last
        by smaller chunks of the loss and by the optimizer's state on the host.
        """
        stages = range(4) if layout.sizes.get("dp", 1) > 1 else ()
        for remat in self.policies:
            for stage in self._choices("zero_stage", stages):
                layout = replace(layout, remat=remat, zero_stage=stage)
                yield layout
        if "training.loss_chunk" not in self.pinned:
            layout = replace(layout, loss_chunk=_SMALL_LOSS_CHUNK)
            yield layout
        is_pinned = "training.offload_optimizer" in self.pinned
        if self.can_offload and not (is_pinned or layout.offload):
            yield replace(layout, offload=True)

    def micro_batch_sizes(self, mesh: Sizes) -> list[int]:
        """Sizes of microbatches that make a group's share of the batch, ascending.

        Raises:
          BatchSizeError: [T503] the groups cannot share the batch, or the share is not
            one of as many microbatches as the command line sets.
        """
        total, training = self.global_batch_size, self.config.training
        whole = replace(training, global_batch_size=total)
        shared = with_batch_sizes(replace(self.config, training=whole), dict(mesh))
        if "training.micro_batch_size" in self.pinned:
            return [shared.training.micro_batch_size]
        share = self.share(mesh)
        if "training.gradient_accumulation_steps" in self.pinned:
            count = training.gradient_accumulation_steps
            if share % count:
                raise BatchSizeError(
                    "the share of a data-parallel group cannot be cut into its "
                    "microbatches",
                    got=f"{share} / training.gradient_accumulation_steps={count} "
                    f"leaves {share % count}",
                    fix=f"use training.gradient_accumulation_steps="
                    f"{nearest(divisors(share), count)}, or leave it out",
                )
            return [share // count]
        return divisors(share)

    def share(self, mesh: Sizes) -> int:
        """Sequences of a step in each data-parallel group of a mesh."""
        return self.global_batch_size // data_parallel_groups(dict(mesh))

    def _schedules(self, sizes: dict[str, int]) -> list[tuple[str | None, int]]:
        training = self.config.training
        if "pp" not in sizes:
            return [(None, 1)]
        # gpipe has the bubble of 1f1b, and keeps more.
        options = [("1f1b", 1), ("zero_bubble", 1)]
        options += [("interleaved", chunks) for chunks in _CHUNKS]
        if "training.pipeline_chunks" in self.pinned:
            chunks = training.pipeline_chunks
            options = [("interleaved", chunks)] if chunks > 1 else options[:2]
        if "training.pipeline_schedule" in self.pinned:
            name = training.pipeline_schedule
            options = [each for each in options if each[0] == name] or [
                (name, 2 if name == "dualpipev" else 1)
            ]
        return list(options)

    def _choices(self, part: str, choices: Collection[Any]) -> Collection[Any]:
        """What a part of a layout may be: any choice, if its setting is not pinned."""
        path = SETTINGS[part]
        group, _, name = path.partition(".")
        is_pinned = path in self.pinned or not choices
        return [getattr(getattr(self.config, group), name)] if is_pinned else choices


def factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many factors, in order.

    Example:
      >>> list(factorings(4, 2))
      [(1, 4), (2, 2), (4, 1)]
    """
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorings(number // first, parts - 1):
            yield (first, *rest)


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending.

    Example:
      >>> divisors(12)
      [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    high = [number // d for d in reversed(low) if d * d != number]
    return low + high
