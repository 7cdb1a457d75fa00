# SPDX-License-Identifier: Apache-2.0
"""``MeshBounds``: what no layout on a mesh is faster than, so few are predicted."""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache

from tessera.train.planner.layout import Layout
from tessera.train.planner.layout_legality import Legality
from tessera.train.planner.search_space import Sizes, Space
from tessera.train.planner.step_time import Pace, StepModel
from tessera.train.planner.workload import LEAST


class MeshBounds:
    """Bounds of the time of a step on the meshes of a space.

    Args:
      space: What may be chosen.
      model: Predicts steps on the target.
      legality: Of layouts.
      fits: Whether any of some variants of a layout fits a device.

    Attributes:
      legal: The layouts with a mesh and the smallest microbatch whose model can be
        computed.
    """

    def __init__(
        self,
        space: Space,
        model: StepModel,
        legality: Legality,
        fits: Callable[[list[Layout]], bool],
    ) -> None:
        self.space, self.model, self.legality, self.fits = space, model, legality, fits
        self._paces = dict[Hashable, Pace]()
        self._groups = dict[Hashable, int]()
        self.legal, self._group = cache(self._find_legal), cache(self._find_group)

    def of_group(self, mesh: Sizes) -> float:
        """Whatever fits, and however ``dp`` and ``fsdp`` share the devices they have.

        Args:
          mesh: One that has legal layouts.
        """
        sizes = self.space.micro_batch_sizes(mesh)
        return min(self.of_size(mesh, size) for size in sizes)

    def of_size(self, mesh: Sizes, size: int) -> float:
        """The same of microbatches of one size."""
        return self._pace(mesh, LEAST, size).busy

    def of_mesh(self, mesh: Sizes) -> float:
        """By what fits; infinite if nothing does.

        Args:
          mesh: As of ``of_group``.
        """
        most, sizes = self._largest_that_fit(mesh), self.space.micro_batch_sizes(mesh)
        fitting = [
            self._pace(mesh, policy, size)
            for policy, largest in most.items()
            for size in sizes
            if size <= largest
        ]
        if not fitting:
            return math.inf
        pace = _least(fitting)
        # The first of each way to gather, with the policy that computes least again.
        policy = next(of for of, size in most.items() if size)
        layouts = self.legal(mesh)
        gathers = {each.gather: each for each in reversed(layouts)}.values()
        stages = {each.zero_stage for each in self.space.variants(layouts[0])}
        return min(
            self.model.least_seconds(
                replace(each, remat=policy, zero_stage=stage), pace
            )
            for each in gathers
            for stage in stages
        )

    def _find_legal(self, mesh: Sizes) -> list[Layout]:
        size = self.space.micro_batch_sizes(mesh)[0]
        layouts = self.space.layouts(mesh, size)
        return [each for each in layouts if not self.legality.model_problem(each)]

    def _find_group(self, mesh: Sizes) -> int:
        """A number that is the same for all meshes with the same paces."""
        layouts = self.legal(mesh)
        alike = frozenset(replace(each, mesh=()) for each in layouts)
        key = self.model.group(layouts[0]), alike
        return self._groups.setdefault(key, len(self._groups))

    def _pace(self, mesh: Sizes, policy: str, size: int) -> Pace:
        """With a policy and a size of microbatches; found once for a group."""
        key = self._group(mesh), policy, size
        if key not in self._paces:
            kinds = {
                replace(each, gather="microbatch", remat=policy)
                for each in self.legal(mesh)
            }
            chosen = (self._with_size(each, size) for each in kinds)
            self._paces[key] = _least([*map(self.model.pace, chosen)])
        return self._paces[key]

    def _largest_that_fit(self, mesh: Sizes) -> dict[str, int]:
        """The largest microbatch that may fit with each policy; 0 if none does."""
        # The first of each kind is 1f1b, or has stages that gather in each microbatch,
        # and takes least memory, as do the last stages of ZeRO.
        layouts = reversed(self.legal(mesh))
        kinds = {(e.chunks, e.sequence_parallel): e for e in layouts}.values()
        variants = [each for kind in kinds for each in self.space.variants(kind)]
        stage = max(each.zero_stage for each in variants)
        found = dict[str, list[Layout]]()
        for each in variants:
            if each.zero_stage == stage:
                found.setdefault(str(each.remat), []).append(each)
        return {policy: self._largest_that_fits(of) for policy, of in found.items()}

    def _largest_that_fits(self, variants: list[Layout]) -> int:
        """The largest microbatch with which any of these may fit; 0 if none does.

        The smallest takes least memory, unless the largest is the only one of a step
        and needs no sums of gradients.
        """
        sizes = self.space.micro_batch_sizes(variants[0].mesh)

        def may_fit(size: int) -> bool:
            return self.fits([self._with_size(each, size) for each in variants])

        if not may_fit(sizes[0]) and not may_fit(sizes[-1]):
            return 0
        return next(filter(may_fit, reversed(sizes)))

    def _with_size(self, layout: Layout, size: int) -> Layout:
        """A layout with microbatches of a size."""
        count = self.space.share(layout.mesh) // size
        return replace(layout, micro_batch_size=size, microbatches=count)


def _least(paces: list[Pace]) -> Pace:
    """What none of them is below."""
    return Pace(min(e.whole for e in paces), min(e.busy for e in paces))
