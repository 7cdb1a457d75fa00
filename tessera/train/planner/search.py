# SPDX-License-Identifier: Apache-2.0
"""Ranks the layouts of a run on a target by the time of their steps.

Illegal ones are rejected by the checks of a run. Meshes are looked at in one order of
their axes first; then all orders of the best ones are, as they lie on the links.
"""

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from tessera.errors import TesseraError
from tessera.train.planner.layout import Layout
from tessera.train.planner.layout_legality import Legality
from tessera.train.planner.memory_model import is_safe
from tessera.train.planner.search_space import MOST_MICROBATCHES, Sizes, Space
from tessera.train.planner.step_time import Prediction, StepModel

# Layouts whose orders of axes are all looked at, and that are kept.
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
      best: Layouts that fit, fastest first.
      smallest: The least memory of a layout, whether it fits or not, and that layout.
      looked_at: Layouts whose time or memory was predicted.
      too_large: Of these, how many do not fit.
      rejected: How many meshes or schedules are not legal, by the code and the headline
        of the error.
      example: An error for each of these.
    """

    best: list[Candidate] = field(default_factory=list)
    smallest: tuple[float, Layout] | None = None
    looked_at: int = 0
    too_large: int = 0
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    example: dict[tuple[str, str], TesseraError] = field(default_factory=dict)


def search(space: Space, model: StepModel) -> SearchResult:
    """The layouts of a space, ranked.

    Args:
      space: What may be chosen.
      model: Predicts steps on the target.
    """
    return _Search(space, model).run()


class _Search:
    def __init__(self, space: Space, model: StepModel) -> None:
        self.space, self.model, self.found = space, model, SearchResult()
        self.legality = Legality(space.config)
        self.capacity = model.target.machine.memory_bytes
        self.fitting: list[Candidate] = []

    def run(self) -> SearchResult:
        for mesh in self.space.meshes(self.model.target.num_devices):
            self._look_at(mesh)
        best = heapq.nsmallest(_BEST, self.fitting, key=_seconds)
        if "model.mesh_shape" not in self.space.pinned:
            for candidate in best:
                self._reorder(candidate.layout)
        self.found.best = _distinct(sorted(self.fitting, key=_seconds))
        return self.found

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
        try:
            sizes = self.space.micro_batch_sizes(mesh)
        except TesseraError as error:
            self._reject(error)
            return
        if problem := self.legality.model_problem(Layout(mesh, 1, 1)):
            self._reject(problem)
            return
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
        last = layout.loss_chunk, layout.offload
        safe: Layout | None = None
        for variant in self.space.variants(layout):
            is_last = (variant.loss_chunk, variant.offload) != last
            if safe and (safe.zero_stage <= _FREE_ZERO or is_last):
                return
            if safe and variant.remat == safe.remat:
                continue
            problem = self.legality.problem(variant)
            if problem is not None:
                self._reject(problem)
                continue
            candidate = self._candidate(variant)
            if candidate is not None and candidate.is_safe:
                safe = variant

    def _candidate(self, layout: Layout) -> Candidate | None:
        """A legal layout and its prediction, if it fits."""
        self.found.looked_at += 1
        nbytes = self.model.memory(layout).total
        smallest = self.found.smallest
        if smallest is None or nbytes < smallest[0]:
            self.found.smallest = nbytes, layout
        if nbytes > self.capacity:
            self.found.too_large += 1
            return None
        safe = is_safe(nbytes, self.model.target.machine)
        candidate = Candidate(layout, self.model.predict(layout), safe)
        self.fitting.append(candidate)
        return candidate


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
