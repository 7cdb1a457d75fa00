# SPDX-License-Identifier: Apache-2.0
"""Assigns arrays of unlike stages to slots that are alike on every device.

One program runs on all devices of a pipeline, so a device's arrays of its stage have
the same shapes everywhere. Arrays of one shape, dtype and layout, one of each stage,
share a slot; a stage without an array for a slot leaves it zero.
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
      slots: The form of each slot; as many of a form as the stage with most has.
      indices: For each stage, the slot of each of its arrays.

    Example:
      >>> packing = Packing.of([["f32[4]", "f32[4]"], ["f32[8]", "f32[4]"]])
      >>> packing.slots
      ('f32[4]', 'f32[4]', 'f32[8]')
      >>> packing.indices
      ((0, 1), (2, 0))
    """

    slots: tuple[Form, ...]
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, stages: Sequence[Sequence[Form]]) -> "Packing[Form]":
        """Slots for the arrays of some stages, given by their forms."""
        most: Counter[Form] = Counter()
        for forms in stages:
            most |= Counter(forms)
        slots = tuple(most.elements())
        return cls(slots, tuple(_slot_indices(forms, slots) for forms in stages))

    def members(self, slot: int) -> list[tuple[int, int] | None]:
        """For each stage, its array in the slot, as (stage, number), or None."""
        return [
            (stage, indices.index(slot)) if slot in indices else None
            for stage, indices in enumerate(self.indices)
        ]

    def unpack(self, stage: int, packed: Sequence[Any]) -> list[Any]:
        """The arrays of one stage, from the arrays of all slots."""
        return [packed[slot] for slot in self.indices[stage]]

    def pack(
        self, stage: int, arrays: Sequence[Any], empty: Sequence[Any]
    ) -> list[Any]:
        """The arrays of all slots: those of one stage, and ``empty`` elsewhere."""
        packed = list(empty)
        for slot, array in zip(self.indices[stage], arrays, strict=True):
            packed[slot] = array
        return packed


def _slot_indices(forms: Sequence[Form], slots: Sequence[Form]) -> tuple[int, ...]:
    free = list(range(len(slots)))
    indices: list[int] = []
    for form in forms:
        indices.append(next(slot for slot in free if slots[slot] == form))
        free.remove(indices[-1])
    return tuple(indices)
