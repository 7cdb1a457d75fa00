# SPDX-License-Identifier: Apache-2.0
"""Examples divided among processes, in another order each epoch."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import (
    BatchSizeError,
    DataChangedError,
    EmptyDataError,
    SettingValueError,
    TesseraWarning,
)
from tessera.train.data import EpochSampler


def read(*sizes: int, epoch: int = 0, **options):
    return [b.tolist() for b in EpochSampler(*sizes, **options).epoch(epoch)]


@given(
    examples=st.integers(1, 50),
    local=st.integers(1, 5),
    processes=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_processes_together_read_what_one_alone_would(
    examples, local, processes, epoch
):
    size = local * processes
    alone = read(examples, size, epoch=epoch)
    shares = [read(examples, size, p, processes, epoch=epoch) for p in range(processes)]
    together = [
        [index for part in parts for index in part]
        for parts in zip(*shares, strict=True)
    ]
    assert together == alone
    assert {len(batch) for batch in alone} == {size}


@given(examples=st.integers(1, 50), size=st.integers(1, 12))
def test_an_epoch_has_every_example_and_repeats_only_to_fill_the_last_batch(
    examples, size
):
    flat = [index for batch in read(examples, size) for index in batch]
    assert sorted(flat[:examples]) == list(range(examples))
    assert len(flat) - examples < size
    again = flat[examples:]
    assert again == [flat[i % examples] for i in range(len(again))]


@pytest.mark.parametrize(
    "sizes",
    [(np.arange(10), 4), ([1, 2], 1), ("data", 4), (9.5, 4), (10, 2.0), (True, 1)],
)
def test_the_data_in_place_of_how_many_there_are_is_an_error(sizes):
    with pytest.raises(SettingValueError, match=r"EpochSampler\(len\(data\)"):
        EpochSampler(*sizes)
    assert len(EpochSampler(np.int64(10), np.int32(4))) == 3


def test_what_fills_no_batch_may_be_dropped():
    sampler = EpochSampler(10, 4, drop_last=True)
    batches = list(sampler.epoch(0))
    assert len(sampler) == len(batches) == 2
    assert len({int(i) for batch in batches for i in batch}) == 8


def test_every_epoch_has_an_order_of_its_own_that_comes_again():
    orders = [read(64, 64, epoch=epoch)[0] for epoch in range(5)]
    assert all(a != b for a, b in pairwise(orders))
    assert len({tuple(order) for order in orders}) == 5
    assert read(64, 64, epoch=3)[0] == orders[3]
    assert read(64, 64, epoch=3, seed=1)[0] != orders[3]


def test_neighboring_seeds_share_no_order():
    orders = [read(64, 64, epoch=e, seed=s)[0] for e in range(3) for s in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_without_shuffling_every_epoch_is_in_order():
    assert read(5, 2, epoch=7, shuffle=False) == [[0, 1], [2, 3], [4, 0]]


def test_an_epoch_goes_on_in_its_middle():
    sampler = EpochSampler(20, 4)
    rest = list(sampler.epoch(1, start=3))
    np.testing.assert_array_equal(rest, list(sampler.epoch(1))[3:])


def test_a_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(BatchSizeError, match="6 rows / 4 processes"):
        EpochSampler(20, 6, 0, 4)


@pytest.mark.parametrize(
    ("examples", "drop_last", "fix"),
    [(0, False, "use a smaller batch\n"), (3, True, "or drop_last=False")],
)
def test_too_few_examples_are_refused(examples, drop_last, fix):
    with pytest.raises(EmptyDataError) as caught:
        EpochSampler(examples, 4, drop_last=drop_last)
    assert fix in str(caught.value)


# --- as the sampler of a DataLoader


@given(
    examples=st.integers(1, 20),
    local=st.integers(1, 4),
    processes=st.integers(1, 3),
    epochs=st.integers(1, 2),
)
def test_a_loop_reads_each_index_once_per_epoch_and_ranks_share_them(
    examples, local, processes, epochs
):
    size = local * processes
    samplers = [EpochSampler(examples, size, p, processes) for p in range(processes)]
    for epoch in range(epochs):
        draw = np.random.Generator(np.random.PCG64([0, epoch]))
        order = draw.permutation(examples).tolist()
        missing = -examples % size
        filled = (order * (missing // examples + 2))[: examples + missing]
        shares = [[b.tolist() for b in sampler] for sampler in samplers]
        assert {len(share) for share in shares} == {len(samplers[0])}
        for number, parts in enumerate(zip(*shares, strict=True)):
            flat = [index for part in parts for index in part]
            assert flat == filled[number * size : (number + 1) * size]


def test_loops_without_set_epoch_read_one_epoch_after_the_other():
    sampler = EpochSampler(8, 4)
    for epoch in range(3):
        np.testing.assert_array_equal(list(sampler), list(sampler.epoch(epoch)))
    sampler.set_epoch(1)
    np.testing.assert_array_equal(list(sampler), list(sampler.epoch(1)))
    np.testing.assert_array_equal(list(sampler), list(sampler.epoch(2)))


def test_a_loop_that_begins_an_epoch_again_says_so():
    sampler = EpochSampler(8, 2)
    first = next(iter(sampler))
    with pytest.warns(TesseraWarning, match="epoch 0 begins again: .* 1 of 4 batches"):
        again = list(sampler)
    np.testing.assert_array_equal(again[0], first)
    assert len(again) == 4
    next(iter(sampler))
    sampler.set_epoch(1)  # as PyTorch users write: nothing to say
    assert len(list(sampler)) == 4


@given(
    stop=st.integers(0, 11), shared=st.sampled_from([(6, 1), (6, 3), (3, 3), (2, 2)])
)
def test_a_resumed_loop_goes_on_with_the_next_batch(stop, shared):
    def read_epochs(sampler, first, batches, stop=None):
        for epoch in range(first, 3):
            sampler.set_epoch(epoch)
            for batch in sampler:
                batches.append(batch)
                if len(batches) == stop:
                    return

    sampler, before = EpochSampler(24, 6), []
    if stop:
        read_epochs(sampler, 0, before, stop)
    state = sampler.state_dict()
    parts = []
    size, processes = shared
    for process in range(processes):
        resumed = EpochSampler(24, size, process, processes)
        resumed.load_state_dict(state)
        parts.append([])
        read_epochs(resumed, state["epoch"], parts[-1])
    after = [part for together in zip(*parts, strict=True) for part in together]
    whole = [batch for epoch in range(3) for batch in sampler.epoch(epoch)]
    np.testing.assert_array_equal(
        np.concatenate([*before, *after, []]), np.concatenate(whole)
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"num_examples": 25}, "num_examples: 24 -> 25"),
        ({"shuffle": False}, "shuffle: 1 -> 0"),
        ({"batch_size": 4}, "examples read: 6, 2 in a batch"),
    ],
)
def test_another_order_is_refused(change, line):
    sampler = EpochSampler(24, 6)
    next(iter(sampler))
    other = EpochSampler(**{"num_examples": 24, "batch_size": 6} | change)
    with pytest.raises(DataChangedError, match=line):
        other.load_state_dict(sampler.state_dict())
    assert other.state_dict()["examples"] == 0
