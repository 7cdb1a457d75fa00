# SPDX-License-Identifier: Apache-2.0
"""Slots that stages share by form."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tessera.graph.pipelining.stage_packing import Packing

FORMS = st.lists(st.lists(st.sampled_from("abc"), max_size=4), min_size=1, max_size=4)


@given(FORMS)
def test_each_array_of_a_stage_has_a_slot_of_its_form_and_its_own(stages):
    packing = Packing.of(stages)
    for forms, places in zip(stages, packing.indices, strict=True):
        assert [packing.slots[place] for place in places] == forms
        assert len(set(places)) == len(places)


@given(FORMS)
def test_there_are_as_many_slots_of_a_form_as_the_stage_with_most_has(stages):
    most = Counter[str]()
    for forms in stages:
        most |= Counter(forms)
    assert Counter(Packing.of(stages).slots) == most


@given(FORMS)
def test_members_are_the_other_way_round(stages):
    packing = Packing.of(stages)
    for slot in range(len(packing.slots)):
        for stage, member in enumerate(packing.members(slot)):
            if member is None:
                assert slot not in packing.indices[stage]
            else:
                assert member[0] == stage
                assert packing.indices[stage][member[1]] == slot


@given(FORMS)
def test_what_is_packed_is_unpacked(stages):
    packing = Packing.of(stages)
    empty = [None] * len(packing.slots)
    for stage, forms in enumerate(stages):
        arrays = [f"{form}{i}" for i, form in enumerate(forms)]
        held = packing.pack(stage, arrays, empty)
        assert packing.unpack(stage, held) == arrays
        assert held.count(None) == len(empty) - len(arrays)
