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
from tessera.train.planner.mesh_bounds import MeshBounds
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
      smallest: The least memory of a layout that does not fit, and that layout.
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

    Those that fit, but not for all that is known, are looked at only where fewer than
    ``most`` layouts surely fit.

    Args:
      space: What may be chosen.
      model: Predicts steps on the target.
      most: How many layouts to rank; with them all that are as fast. Meshes are left
        out of which no layout can be.
    """
    most, legality = max(most, 1), Legality(space.config)
    found = _Search(space, model, legality, most, surely=True).run()
    if len(found.best) < most:
        found = _Search(space, model, legality, most, surely=False).run()
    return found


class _Search:
    def __init__(
        self,
        space: Space,
        model: StepModel,
        legality: Legality,
        most: int,
        *,
        surely: bool,
    ) -> None:
        self.space, self.model, self.found = space, model, SearchResult()
        self.legality, self.most, self.surely = legality, most, surely
        self.fitting: list[Candidate] = []
        self.slowest = math.inf
        self.bounds = MeshBounds(space, model, legality, self._may_fit)

    def run(self) -> SearchResult:
        meshes = [
            *filter(self._is_legal, self.space.meshes(self.model.target.num_devices))
        ]
        # Meshes by their bounds, of which the second takes longer and is closer.
        waiting = [
            (self.bounds.of_group(each), 0, at) for at, each in enumerate(meshes)
        ]
        heapq.heapify(waiting)
        fastest, ranked = list[Candidate](), list[Candidate]()
        while waiting and waiting[0][0] <= self.slowest:
            least, level, at = heapq.heappop(waiting)
            if level == 0:
                least = max(least, self.bounds.of_mesh(meshes[at]))
                if not math.isinf(least):
                    heapq.heappush(waiting, (least, 1, at))
                continue
            before = len(self.fitting)
            self._look_at(meshes[at])
            found = sorted(self.fitting[before:], key=_seconds)
            fastest = sorted([*fastest, *found], key=_seconds)[:_BEST]
            ranked = sorted([*ranked, *_distinct(found)], key=_seconds)[: self.most]
            if self.surely and len(ranked) == self.most and len(fastest) == _BEST:
                self.slowest = max(_seconds(ranked[-1]), _seconds(fastest[-1]))[0]
        if "model.mesh_shape" not in self.space.pinned:
            for candidate in fastest:
                self._reorder(candidate.layout)
        every = _distinct(sorted(self.fitting, key=_seconds))
        self.found.best = [e for e in every if _seconds(e)[0] <= self.slowest]
        return self.found

    def _is_legal(self, mesh: Sizes) -> bool:
        """Whether a model can be computed on a mesh, whose groups share the batch."""
        try:
            size = self.space.micro_batch_sizes(mesh)[0]
        except TesseraError as error:
            self._reject(error)
            return False
        problem = self.legality.model_problem(Layout(mesh, 1, 1))
        if problem is None and not self.bounds.legal(mesh):
            first = self.space.layouts(mesh, size)[0]
            problem = self.legality.model_problem(first)
        if problem:
            self._reject(problem)
        return problem is None

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
        if many and not self._fits(mesh, few[0]):
            few = [next((size for size in many if self._fits(mesh, size)), many[-1])]
        for size in few:
            if self.bounds.of_size(mesh, size) > self.slowest:
                continue
            layouts = self.space.layouts(mesh, size)
            may_fit = [self._consider(each) for each in layouts]
            if not any(may_fit):
                return

    def _fits(self, mesh: Sizes, micro_batch_size: int) -> bool:
        """Whether any legal layout with microbatches of a size may fit."""
        return any(
            self._may_fit([*self.space.variants(layout)])
            for layout in self.space.layouts(mesh, micro_batch_size)
            if not self.legality.problem(layout)
        )

    def _reject(self, error: TesseraError) -> None:
        reason = error.code, error.what
        self.found.rejected[reason] += 1
        self.found.example.setdefault(reason, error)

    def _consider(self, layout: Layout) -> bool:
        """Predict a layout with what saves memory, until it fits for all that is known.

        What saves memory takes time. So no policy is looked at that computes more again
        than one that fits, unless the latter needs ZeRO to send more than without, and
        none where it and all others after it are too slow.

        Returns:
          Whether it may fit with any of them.
        """
        if problem := self.legality.model_problem(layout):
            self._reject(problem)
            return False
        policies = [*map(str, self.space.policies)]
        while policies and self._is_slow(replace(layout, remat=policies[-1])):
            policies.pop()
        if not policies:
            return True
        every = [*self.space.variants(layout)]
        variants = [each for each in every if str(each.remat) in policies]
        if not self._may_fit(variants):
            return self._may_fit(every)
        last = layout.loss_chunk, layout.offload
        safe: Layout | None = None
        for variant in variants:
            is_last = (variant.loss_chunk, variant.offload) != last
            if safe and (safe.zero_stage <= _FREE_ZERO or is_last):
                break
            if safe and variant.remat == safe.remat:
                continue
            candidate = self._candidate(variant)
            if candidate is not None and candidate.is_safe:
                safe = variant
        return True

    def _is_slow(self, layout: Layout) -> bool:
        """Whether a layout is surely slower than what was found."""
        return self.model.pace(layout).busy > self.slowest

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
        """The memory of a layout, if it fits, and surely where that is asked for."""
        self.found.looked_at += 1
        memory, machine = self.model.memory(layout), self.model.target.machine
        if memory.total <= machine.memory_bytes:
            is_wanted = not self.surely or is_safe(memory.total, machine)
            return memory if is_wanted else None
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
    that matter less than a prediction's error. One that surely fits stands beside a
    faster one that may not.
    """
    seen = set()
    kept = []
    for each in ranked:
        layout = each.layout
        policy = str(layout.remat), layout.schedule is None, each.is_safe
        key = frozenset(layout.mesh), policy
        if key not in seen:
            seen.add(key)
            kept.append(each)
    return kept
