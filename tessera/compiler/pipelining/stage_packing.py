# SPDX-License-Identifier: Apache-2.0
"""Stages that differ, in arrays that are alike on every device.

One program runs on all devices of a pipeline, so what a device holds of its stage has
the same shapes everywhere. Arrays of equal form, one of each stage, share a slot; a
stage that has no array for a slot leaves it zero.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Form = TypeVar("Form", bound=Hashable)


@dataclass(frozen=True)
class Packing(Generic[Form]):
    """Which slot each array of each stage has.

    Attributes:
      slots: The form of each slot: as many of a form as the stage with most has.
      places: For each stage, the slot of each of its arrays.

    Example:
      >>> packing = Packing.of([["f32[4]", "f32[4]"], ["f32[8]", "f32[4]"]])
      >>> packing.slots
      ('f32[4]', 'f32[4]', 'f32[8]')
      >>> packing.places
      ((0, 1), (2, 0))
    """

    slots: tuple[Form, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, stages: Sequence[Sequence[Form]]) -> "Packing[Form]":
        """Slots for the arrays of some stages, given by their forms."""
        most: Counter[Form] = Counter()
        for forms in stages:
            most |= Counter(forms)
        slots = tuple(most.elements())
        return cls(slots, tuple(_placed(forms, slots) for forms in stages))

    def members(self, slot: int) -> list[tuple[int, int] | None]:
        """For each stage, which of its arrays has the slot, as (stage, number)."""
        return [
            (stage, places.index(slot)) if slot in places else None
            for stage, places in enumerate(self.places)
        ]

    def unpack(self, stage: int, held: Sequence[Any]) -> list[Any]:
        """The arrays of one stage, from what is in all slots."""
        return [held[slot] for slot in self.places[stage]]

    def pack(
        self, stage: int, arrays: Sequence[Any], empty: Sequence[Any]
    ) -> list[Any]:
        """What is in all slots, from the arrays of one stage and what is elsewhere."""
        held = list(empty)
        for slot, array in zip(self.places[stage], arrays, strict=True):
            held[slot] = array
        return held


def _placed(forms: Sequence[Form], slots: Sequence[Form]) -> tuple[int, ...]:
    free = list(range(len(slots)))
    places: list[int] = []
    for form in forms:
        places.append(next(slot for slot in free if slots[slot] == form))
        free.remove(places[-1])
    return tuple(places)
