# SPDX-License-Identifier: Apache-2.0
"""The order of rows: seeds, passes, processes, resumption, threads."""

import os
import subprocess
import sys
import textwrap
import threading
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import BatchSizeError
from tessera.foundations.labels import IGNORE_INDEX
from tessera.train.data.batches import (
    Share,
    closing,
    order_fingerprint,
    train_batches,
    validation_batches,
)
from tessera.train.data.packing import PackedRows, join


def rows_of(count: int) -> PackedRows:
    """Rows of two positions that hold 2r and 2r + 1."""
    ids = np.arange(2 * count + 1, dtype=np.int32)
    stream = join([(ids, None)], separator=None, vocab_size=ids.size)
    return PackedRows(stream, 2, keep_tail=False)


def train(rows, batch_size, steps, *, process=0, of=1, seed=0, start=0, prefetch=2):
    """Which rows each of the next batches holds: [steps, rows of this process]."""
    share = Share(batch_size, process, of)
    batches = train_batches(
        *([rows], [1.0], share), seed=seed, start_row=start, prefetch=prefetch
    )
    taken = [batch["tokens"][:, 0] // 2 for batch in islice(batches, steps)]
    batches.close()
    return np.stack(taken)


# grain draws a row of few in a millisecond and one of many in microseconds.
@pytest.mark.full
@settings(max_examples=15)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**40))
def test_each_pass_holds_every_row_once(count, batch_size, seed):
    steps = -(-3 * count // batch_size)
    order = train(rows_of(count), batch_size, steps, seed=seed).reshape(-1)
    for begin in range(0, order.size - count + 1, count):
        assert sorted(order[begin : begin + count]) == list(range(count))


def test_each_pass_has_its_own_order():
    passes = train(rows_of(50), 5, 40).reshape(4, 50)
    assert len({tuple(order) for order in passes}) == 4


def test_seeds_decide_the_order():
    rows = rows_of(50)
    orders = [train(rows, 10, 5, seed=seed) for seed in (0, 1, -1, 2**70)]
    assert len({order.tobytes() for order in orders}) == 4
    np.testing.assert_array_equal(orders[0], train(rows, 10, 5, seed=0))


def test_neighboring_seeds_do_not_share_a_later_pass():
    first, second = (train(rows_of(50), 50, 3, seed=seed) for seed in (0, 1))
    assert not {row.tobytes() for row in first} & {row.tobytes() for row in second}


@pytest.mark.full
@settings(max_examples=12)
@given(st.sampled_from([1, 2, 3, 6]), st.integers(200, 210), st.integers(0, 9))
def test_processes_together_read_what_one_reads(count, num_rows, seed):
    rows = rows_of(num_rows)
    parts = [train(rows, 30, 9, process=p, of=count, seed=seed) for p in range(count)]
    assert {part.shape for part in parts} == {(9, 30 // count)}
    together = np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(together, train(rows, 30, 9, seed=seed))


@pytest.mark.parametrize(("start", "prefetch"), [(0, 0), (5, 3), (11, 0)])
def test_a_run_continues_where_it_stopped(start, prefetch):
    rows = rows_of(500)
    whole = train(rows, 60, 12)  # into the second pass
    resumed = train(rows, 60, 12 - start, start=60 * start, prefetch=prefetch)
    np.testing.assert_array_equal(resumed, whole[start:])


@pytest.mark.parametrize(
    ("steps", "size", "processes"), [(1, 20, 1), (4, 6, 5), (9, 60, 5)]
)
def test_batches_of_another_size_continue_with_the_next_row(
    order, steps, size, processes
):
    assert_continued(order, steps, size, processes)


@pytest.mark.full
@settings(max_examples=20)
@given(st.integers(0, 9), st.sampled_from([5, 6, 20, 60]), st.sampled_from([1, 5]))
def test_any_size_continues_with_the_next_row(order, steps, size, processes):
    assert_continued(order, steps, size, processes)


@pytest.fixture(scope="module")
def order():
    """Of seventy rows in batches of thirty, into the ninth pass."""
    return train(rows_of(70), 30, 20).reshape(-1)


def assert_continued(order, steps, size, processes):
    rows = rows_of(70)
    read, size = 30 * steps, size - size % processes or processes
    parts = [
        train(rows, size, 4, start=read, process=process, of=processes)
        for process in range(processes)
    ]
    resumed = np.concatenate(parts, axis=1).reshape(-1)
    np.testing.assert_array_equal(resumed, order[read : read + resumed.size])


def test_the_fingerprint_of_an_order_knows_rows_and_seed():
    marks = [order_fingerprint([50], [1.0], 0), order_fingerprint([50], [1.0], 1)]
    marks += [order_fingerprint([51], [1.0], 0), order_fingerprint([50], [1.0], 0)]
    assert len(set(marks)) == 3
    assert marks[0] == marks[3]


def validate(rows, batch_size, *, process=0, of=1):
    return list(validation_batches(rows, Share(batch_size, process, of), prefetch=2))


@pytest.mark.parametrize(("count", "num_batches"), [(8, 2), (9, 3), (1, 1), (0, 0)])
def test_validation_gives_every_row_once_in_whole_batches(count, num_batches):
    batches = validate(rows_of(count), 4)
    assert [batch["tokens"].shape for batch in batches] == [(4, 2)] * num_batches
    real = [b["tokens"][b["segment_ids"] > 0].reshape(-1, 2)[:, 0] for b in batches]
    seen = [int(token) // 2 for tokens in real for token in tokens]
    assert sorted(seen) == list(range(count))
    padding = [b["targets"][b["segment_ids"] == 0] for b in batches]
    assert all((targets == IGNORE_INDEX).all() for targets in padding)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 16])
def test_a_limit_gives_the_same_rows_in_batches_of_any_size(batch_size):
    def first(limit):
        share = Share(batch_size, 0, 1)
        batches = validation_batches(rows_of(9), share, prefetch=2, limit=limit)
        return [
            row.tolist()
            for batch in batches
            for row, ids in zip(batch["tokens"], batch["segment_ids"], strict=True)
            if ids.any()
        ]

    assert first(5) == first(None)[:5] == first(99)[:5]
    assert len(first(None)) == 9


def test_validation_processes_together_read_what_one_reads():
    rows = rows_of(9)
    parts = [validate(rows, 4, process=p, of=2) for p in range(2)]
    for whole, first, second in zip(validate(rows, 4), *parts, strict=True):
        for name, values in whole.items():
            joined = np.concatenate([first[name], second[name]])
            np.testing.assert_array_equal(values, joined)


def test_a_batch_that_processes_do_not_divide_is_refused():
    with pytest.raises(BatchSizeError) as caught:
        Share(10, 0, 4)
    assert str(caught.value) == (
        "[T503] the global batch cannot be divided evenly over the processes\n"
        "  got: 10 rows / 4 processes\n"
        "  fix: use 8 or 12 rows\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )
    with pytest.raises(BatchSizeError, match="fix: use 4 rows"):
        Share(0, 0, 4)


def loader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]


def test_no_thread_is_left_when_batches_end_or_are_closed():
    before = loader_threads()
    endless = train_batches(
        *([rows_of(9)], [1.0], Share(3, 0, 1)), seed=0, start_row=0, prefetch=2
    )
    next(endless)
    finite = validation_batches(rows_of(9), Share(3, 0, 1), prefetch=2)
    next(finite)
    started = [thread for thread in loader_threads() if thread not in before]
    assert len(started) == 2
    endless.close()
    assert len(list(finite)) == 2
    for thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()


class Held:
    """An iterator that is referred to from elsewhere, and so outlives its reader."""

    closed = False

    def __iter__(self):
        return iter([{}, {}])

    def close(self):
        self.closed = True


def test_closing_does_not_wait_for_the_garbage_collector():
    for take in (1, 3):
        held = Held()
        batches = closing(held)
        assert len(list(islice(batches, take))) == min(take, 2)
        assert held.closed == (take == 3)
        batches.close()
        assert held.closed


@pytest.mark.full
def test_a_program_ends_with_batches_open_no_backend_started_and_nothing_said():
    program = """
        from tessera.train.data import DataConfig, load
        corpus = load(DataConfig(), sequence_length=64, seed=0, vocab_size=257)
        batches = corpus.train(8)
        next(batches)
        next(corpus.validation(8))
    """
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        # A platform that does not exist: whoever asks JAX for devices fails.
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
