# SPDX-License-Identifier: Apache-2.0
"""Ranks the layouts of a run on a target by the time of their steps.

Illegal ones are rejected by the checks of a run. Meshes are looked at in one order of
their axes first; then all orders of the best ones are, as they lie on the links.
"""

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from tessera.errors import TesseraError
from tessera.train.planner.layout import Layout
from tessera.train.planner.layout_legality import Legality
from tessera.train.planner.memory_model import MemoryEstimate, is_safe
from tessera.train.planner.search_space import MOST_MICROBATCHES, Sizes, Space
from tessera.train.planner.step_time import Prediction, StepModel

# Layouts whose orders of axes are all looked at.
_BEST: Final = 40
# Stages of ZeRO up to this one send no more than an all-reduce of the gradients.
_FREE_ZERO: Final = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal layout.

    Attributes:
      layout: The layout.
      prediction: What is expected of it.
      is_safe: Whether it fits by more than the error of a prediction of memory.
    """

    layout: Layout
    prediction: Prediction
    is_safe: bool


@dataclass
class SearchResult:
    """What a search has found.

    Attributes:
      best: Layouts that fit, fastest first; those that are slower than as many as were
        asked for are left out.
      smallest: The least memory of a layout, whether it fits or not, and that layout.
      looked_at: Layouts whose time or memory was predicted.
      too_large: Of these, how many do not fit.
      rejected: How many meshes or layouts are not legal, by the code and the headline
        of the error.
      example: An error for each of these.
    """

    best: list[Candidate] = field(default_factory=list)
    smallest: tuple[float, Layout] | None = None
    looked_at: int = 0
    too_large: int = 0
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    example: dict[tuple[str, str], TesseraError] = field(default_factory=dict)


def search(space: Space, model: StepModel, most: int = 10) -> SearchResult:
    """The best layouts of a space, ranked.

    Args:
      space: What may be chosen.
      model: Predicts steps on the target.
      most: How many layouts that surely fit to rank; with them all that are as fast.
        Meshes are left out of which no layout can be.
    """
    return _Search(space, model, max(most, 1)).run()


class _Search:
    def __init__(self, space: Space, model: StepModel, most: int) -> None:
        self.space, self.model, self.found = space, model, SearchResult()
        self.legality = Legality(space.config)
        self.capacity = model.target.machine.memory_bytes
        self.fitting: list[Candidate] = []
        self.most = most

    def run(self) -> SearchResult:
        meshes = [*self.space.meshes(self.model.target.num_devices)]
        least = {mesh: self._least_seconds(mesh) for mesh in meshes}
        slowest, safe = math.inf, list[float]()
        for mesh in sorted(meshes, key=least.__getitem__):
            if math.isinf(least[mesh]) or least[mesh] > slowest:
                break
            before = len(self.fitting)
            self._look_at(mesh)
            ranked = _distinct(sorted(self.fitting[before:], key=_seconds))
            safe += [each.prediction.seconds for each in ranked if each.is_safe]
            safe = sorted(safe)[: self.most]
            if len(safe) == self.most and len(self.fitting) >= _BEST:
                fastest = heapq.nsmallest(_BEST, map(_seconds, self.fitting))
                slowest = max(safe[-1], fastest[-1][0])
        order = {mesh: number for number, mesh in enumerate(meshes)}
        self.fitting.sort(key=lambda each: order[each.layout.mesh])
        best = heapq.nsmallest(_BEST, self.fitting, key=_seconds)
        if "model.mesh_shape" not in self.space.pinned:
            for candidate in best:
                self._reorder(candidate.layout)
        ranked = _distinct(sorted(self.fitting, key=_seconds))
        self.found.best = [each for each in ranked if _seconds(each)[0] <= slowest]
        return self.found

    def _least_seconds(self, mesh: Sizes) -> float:
        """What no layout with a mesh is faster than; infinite if none is legal or fits.

        By the policies of rematerialization and the sizes of microbatches that fit.
        """
        try:
            sizes = self.space.micro_batch_sizes(mesh)
        except TesseraError as error:
            self._reject(error)
            return math.inf
        if problem := self.legality.model_problem(Layout(mesh, 1, 1)):
            self._reject(problem)
            return math.inf
        layouts = [
            each
            for each in self.space.layouts(mesh, sizes[0])
            if not self.legality.model_problem(each)
        ]
        # The first of each kind is 1f1b, or has stages that gather in each microbatch,
        # and takes least memory.
        kinds = {(e.chunks, e.sequence_parallel): e for e in reversed(layouts)}.values()
        variants = [each for kind in kinds for each in self.space.variants(kind)]
        stages = {each.zero_stage for each in variants}
        smallest = [each for each in variants if each.zero_stage == max(stages)]
        least = dict[str, tuple[float, float]]()
        for policy in dict.fromkeys(str(each.remat) for each in variants):
            alike = [each for each in smallest if str(each.remat) == policy]
            if most := self._largest_that_fits(alike, sizes):
                chosen = (
                    self._with_size(replace(each, remat=policy), size)
                    for each in kinds
                    for size in sizes
                    if size <= most
                )
                found = zip(*map(self.model.least_compute, chosen), strict=True)
                least[policy] = min(next(found)), min(next(found))
        if not least:
            return math.inf
        whole, slowest = (min(each) for each in zip(*least.values(), strict=True))
        layouts = [replace(each, remat=next(iter(least))) for each in layouts]
        return min(
            self.model.least_seconds(replace(each, zero_stage=of), whole, slowest)
            for each in {each.gather: each for each in reversed(layouts)}.values()
            for of in stages
        )

    def _largest_that_fits(self, variants: list[Layout], sizes: list[int]) -> int:
        """The largest microbatch with which any of these may fit; 0 if none does.

        The smallest takes least memory, unless the largest is the only one of a step
        and needs no sums of gradients.
        """
        if not any(
            self._may_fit([self._with_size(each, size) for each in variants])
            for size in (sizes[0], sizes[-1])
        ):
            return 0
        return next(
            size
            for size in reversed(sizes)
            if self._may_fit([self._with_size(each, size) for each in variants])
        )

    def _with_size(self, layout: Layout, size: int) -> Layout:
        """A layout with microbatches of a size."""
        count = self.space.share(layout.mesh) // size
        return replace(layout, micro_batch_size=size, microbatches=count)

    def _reorder(self, layout: Layout) -> None:
        """Predict orders of the axes that lie on the links in ways of their own."""
        seen = {self.model.spans(layout.mesh)}
        for mesh in itertools.permutations(layout.mesh):
            if (spans := self.model.spans(mesh)) not in seen:
                seen.add(spans)
                self._candidate(replace(layout, mesh=mesh))

    def _look_at(self, mesh: Sizes) -> None:
        """Predict the layouts with a mesh.

        Larger microbatches take more memory, so none is looked at after one that does
        not fit. More microbatches than the bubble of a pipeline calls for are looked at
        only where fewer do not fit.
        """
        sizes = self.space.micro_batch_sizes(mesh)
        most = MOST_MICROBATCHES * dict(mesh).get("pp", self.space.global_batch_size)
        share = self.space.share(mesh)
        few = [size for size in sizes if share // size <= most] or sizes[-1:]
        many = [size for size in reversed(sizes) if size < few[0]]
        if not self._fits(mesh, few[0]):
            any(self._fits(mesh, size) for size in many)
            return
        all(self._fits(mesh, size) for size in few[1:])

    def _fits(self, mesh: Sizes, micro_batch_size: int) -> bool:
        """Whether any layout with microbatches of a size fits; all are predicted."""
        before = len(self.fitting)
        for layout in self.space.layouts(mesh, micro_batch_size):
            self._consider(layout)
        return len(self.fitting) > before

    def _reject(self, error: TesseraError) -> None:
        reason = error.code, error.what
        self.found.rejected[reason] += 1
        self.found.example.setdefault(reason, error)

    def _consider(self, layout: Layout) -> None:
        """Predict a layout with what saves memory, until it fits for all that is known.

        What saves memory takes time. So no policy is looked at that computes more again
        than one that fits, unless the latter needs ZeRO to send more than without.
        """
        if problem := self.legality.model_problem(layout):
            self._reject(problem)
            return
        variants = [*self.space.variants(layout)]
        if not self._may_fit(variants):
            return
        last = layout.loss_chunk, layout.offload
        safe: Layout | None = None
        for variant in variants:
            is_last = (variant.loss_chunk, variant.offload) != last
            if safe and (safe.zero_stage <= _FREE_ZERO or is_last):
                return
            if safe and variant.remat == safe.remat:
                continue
            candidate = self._candidate(variant)
            if candidate is not None and candidate.is_safe:
                safe = variant

    def _may_fit(self, variants: list[Layout]) -> bool:
        """Whether any variant fits; the later stages of ZeRO take the less memory."""
        most = max(variant.zero_stage for variant in variants)
        least = [variant for variant in variants if variant.zero_stage == most]
        return any(self._memory(variant) is not None for variant in reversed(least))

    def _candidate(self, layout: Layout) -> Candidate | None:
        """A legal layout and its prediction, if it fits."""
        memory = self._memory(layout)
        if memory is None:
            return None
        if problem := self.legality.problem(layout):
            self._reject(problem)
            return None
        safe = is_safe(memory.total, self.model.target.machine)
        candidate = Candidate(layout, self.model.predict(layout, memory), safe)
        self.fitting.append(candidate)
        return candidate

    def _memory(self, layout: Layout) -> MemoryEstimate | None:
        """The memory of a layout, if it fits."""
        self.found.looked_at += 1
        memory = self.model.memory(layout)
        if memory.total <= self.capacity:
            return memory
        self.found.too_large += 1
        least, _ = self.found.smallest or (math.inf, layout)
        if memory.total < least and self.legality.problem(layout) is None:
            self.found.smallest = memory.total, layout
        return None


def _seconds(candidate: Candidate) -> tuple[float, int]:
    prediction = candidate.prediction
    return prediction.seconds, prediction.memory_bytes


def _distinct(ranked: list[Candidate]) -> list[Candidate]:
    """The best of each mesh and policy first; variants that change little are left out.

    Two layouts whose meshes, microbatches and policies are alike differ in settings
    that matter less than a prediction's error.
    """
    seen = set()
    kept = []
    for each in ranked:
        layout = each.layout
        key = frozenset(layout.mesh), str(layout.remat), layout.schedule is None
        if key not in seen:
            seen.add(key)
            kept.append(each)
    return kept
