# SPDX-License-Identifier: Apache-2.0
"""What a number of microbatches divides, and what too few of them cost."""

import warnings

import pytest

from tessera.errors import BatchSizeError, TesseraWarning
from tessera.graph.pipelining import schedule
from tessera.graph.pipelining.microbatches import (
    check_batch,
    fewer_microbatches_warning,
)


def test_a_batch_that_divides_is_taken():
    for rows, microbatches in ((8, 8), (32, 8), (5, 1)):
        check_batch(rows, microbatches)


@pytest.mark.parametrize(
    ("rows", "microbatches", "fix"),
    [
        (30, 8, "use a batch of 24 or 32 rows, or 6 or 10 microbatches"),
        (7, 2, "use a batch of 6 or 8 rows, or 1 or 7 microbatches"),
        (3, 8, "use a batch of 8 rows, or 3 microbatches"),
        (0, 4, "use a batch of 4 rows"),
    ],
)
def test_one_that_does_not_is_answered_with_the_nearest_sizes(rows, microbatches, fix):
    with pytest.raises(BatchSizeError) as caught:
        check_batch(rows, microbatches)
    assert str(caught.value) == (
        f"[T503] a batch cannot be split into {microbatches} equal microbatches\n"
        f"  got: {rows} rows, {microbatches} microbatches: "
        f"{rows} % {microbatches} = {rows % microbatches}\n"
        f"  fix: {fix}\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )


def test_fewer_microbatches_than_stages_is_a_warning_that_states_the_bubble():
    with pytest.warns(TesseraWarning) as caught:
        fewer_microbatches_warning(schedule("1f1b", stages=4, microbatches=2))
    assert [str(item.message) for item in caught] == [
        "2 microbatches for 4 pipeline stages: under '1f1b' the devices wait for 60 % "
        "of the time; use at least 4 microbatches, better several times as many"
    ]


def test_as_many_microbatches_as_stages_are_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fewer_microbatches_warning(schedule("gpipe", stages=4, microbatches=4))
