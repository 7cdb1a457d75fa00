# SPDX-License-Identifier: Apache-2.0
"""Ranks the layouts of a run on a target by the time of their steps.

Illegal ones are rejected by the checks of a run. Meshes are looked at in one order of
their axes first; then all orders of the best ones are, as they lie on the links.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Final

from tessera.errors import TesseraError
from tessera.mesh import Mesh
from tessera.planner.layout import Layout
from tessera.planner.memory_model import is_safe
from tessera.planner.prediction import Prediction
from tessera.planner.space import Sizes, Space, orders
from tessera.planner.step_time import StepModel
from tessera.training.layout_checks import build_model, layout_problems

# Layouts whose orders of axes are all looked at, and that are kept.
_BEST: Final = 40


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
class Found:
    """What a search has found.

    Attributes:
      best: Layouts that fit, fastest first.
      front: The fastest for each amount of memory, from the least memory on.
      smallest: The layout that takes least memory, whether it fits or not.
      larger: The fastest that would fit a device of twice the memory, and not this one.
      looked_at: Layouts whose time or memory was predicted.
      too_large: Of these, how many do not fit.
      rejected: How many meshes or schedules are not legal, by the code and the headline
        of the error.
      example: An error for each of these.
    """

    best: list[Candidate] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    smallest: Candidate | None = None
    larger: Candidate | None = None
    looked_at: int = 0
    too_large: int = 0
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    example: dict[tuple[str, str], TesseraError] = field(default_factory=dict)


def search(space: Space, model: StepModel) -> Found:
    """The layouts of a space, ranked.

    Args:
      space: What may be chosen.
      model: Predicts steps on the target.
    """
    return _Search(space, model).run()


class _Search:
    def __init__(self, space: Space, model: StepModel) -> None:
        self.space, self.model, self.found = space, model, Found()
        self.capacity = model.target.machine.memory_bytes
        self.fitting: list[Candidate] = []

    def run(self) -> Found:
        for mesh in self.space.meshes(self.model.target.num_devices):
            if self._is_legal(mesh):
                self._look_at(mesh)
        best = heapq.nsmallest(_BEST, self.fitting, key=_seconds)
        if "model.mesh_shape" not in self.space.pinned:
            for candidate in best:
                for mesh in self._other_orders(candidate.layout.mesh):
                    self._candidate(replace(candidate.layout, mesh=mesh))
        self.found.best = _distinct(sorted(self.fitting, key=_seconds))
        self.found.front = _front(self.fitting)
        return self.found

    def _look_at(self, mesh: Sizes) -> None:
        """Predict the layouts with a mesh, up to microbatches that do not fit."""
        by_size = groupby(self.space.layouts(mesh), key=attrgetter("micro_batch_size"))
        for _, layouts in by_size:
            before = len(self.fitting)
            for layout in layouts:
                self._consider(layout)
            if len(self.fitting) == before:
                return

    def _is_legal(self, mesh: Sizes) -> bool:
        """Whether a run on a mesh passes its checks, whatever else is chosen."""
        config = Layout(mesh, 1, 1).applied(self.space.config)
        total = self.space.global_batch_size
        training = replace(config.training, global_batch_size=total)
        config = replace(config, training=training)
        try:
            problems = layout_problems(config)
            if not problems:
                placed = Mesh([n for n, _ in mesh], shape=[s for _, s in mesh])
                build_model(config, placed).layouts(placed)
        except TesseraError as error:
            problems = [error]
        for problem in problems[:1]:
            self._reject(problem)
        return not problems

    def _reject(self, error: TesseraError) -> None:
        reason = error.code, error.what
        self.found.rejected[reason] += 1
        self.found.example.setdefault(reason, error)

    def _consider(self, layout: Layout) -> None:
        """Predict a layout with what saves memory, until it fits for all that is known.

        What saves memory takes time, so the rest of the variants is not looked at.
        """
        for variant in self.space.variants(layout):
            try:
                candidate = self._candidate(variant)
            except TesseraError as error:  # there is no such schedule
                self._reject(error)
                return
            if candidate is not None and candidate.is_safe:
                return

    def _candidate(self, layout: Layout) -> Candidate | None:
        """A layout and its prediction, if it may fit.

        Raises:
          TesseraError: There is no schedule of these sizes.
        """
        self.found.looked_at += 1
        if layout.schedule:
            self.model.schedule(layout)
        nbytes = self.model.memory(layout).total
        fits = nbytes <= self.capacity
        smallest = self.found.smallest
        is_new = smallest is None or nbytes < smallest.prediction.memory_bytes
        self.found.too_large += not fits
        if not (fits or is_new or nbytes <= 2 * self.capacity):
            return None
        prediction = self.model.predict(layout)
        safe = is_safe(nbytes, self.model.target.machine)
        candidate = Candidate(layout, prediction, safe)
        if is_new:
            self.found.smallest = candidate
        if fits:
            self.fitting.append(candidate)
            return candidate
        larger = self.found.larger
        if larger is None or _seconds(candidate) < _seconds(larger):
            self.found.larger = candidate
        return None

    def _other_orders(self, mesh: Sizes) -> Iterator[Sizes]:
        """Orders of the axes that lie on the links in ways of their own."""
        seen = {self.model.spans(mesh)}
        for order in orders(mesh):
            if (spans := self.model.spans(order)) not in seen:
                seen.add(spans)
                yield order


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
        key = layout.sizes.items(), layout.remat, layout.schedule is None
        key = frozenset(key[0]), str(key[1]), key[2]
        if key not in seen:
            seen.add(key)
            kept.append(each)
    return kept


def _front(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates that no other one beats in both time and memory."""
    front: list[Candidate] = []
    for each in sorted(
        candidates, key=lambda c: (c.prediction.memory_bytes, _seconds(c))
    ):
        if not front or each.prediction.seconds < front[-1].prediction.seconds:
            front.append(each)
    return front
