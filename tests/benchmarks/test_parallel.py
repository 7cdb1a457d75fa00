# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/parallel.py`` counts; how long steps take is not tested."""

import importlib
import math
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def parallel():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        before = set(sys.modules)
        yield importlib.import_module("parallel")
        for name in set(sys.modules) - before:
            if (
                Path(getattr(sys.modules[name], "__file__", None) or "").parent
                == FOLDER
            ):
                del sys.modules[name]


def nbytes_on_one_device(tree):
    def nbytes(array):
        return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize

    return sum(map(nbytes, jax.tree.leaves(tree)))


@pytest.mark.full
def test_a_step_holds_and_sends_what_the_one_by_hand_does(parallel):
    both = parallel.prepare("tp")
    ours, theirs = parallel.counted("tp", both)
    assert ours == theirs
    assert ours.arguments == nbytes_on_one_device((both.state, both.batch))
    assert {axes for axes, _ in ours.sent} == {("tp",)}
    seconds = [[0.3, 0.2, 0.4], [0.2, 0.1, 0.3]]
    row = parallel.compared("tp", [ours, theirs], seconds)
    assert row["bytes sent"] == row["temporaries"] == "1.000"
    assert row["step time"] == "1.500"


@pytest.mark.full
def test_a_pipeline_sends_both_ways_in_every_tick(parallel):
    both = parallel.prepare("1f1b")
    (counts,) = parallel.counted("1f1b", both)
    ticks = parallel.MODES["1f1b"].step_config(parallel.MICROBATCHES).schedule.ticks
    assert counts.sent[("pp",), "collective-permute"].calls == 2 * ticks
    rows = list(counts.rows("1f1b", "Tessera"))
    assert sum(row["bytes"] for row in rows) == counts.nbytes
    assert sum(row["calls"] for row in rows) == counts.calls


def test_idle_time_is_that_of_the_formulas(parallel):
    rows = parallel.pipelines.idle_rows()
    assert {row["schedule"] for row in rows} == set(parallel.pipelines.SCHEDULES)
    assert all(row["counted"] == row["formula"] for row in rows)


def test_modes_are_chosen_by_name(parallel, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parallel.py", "--modes", "dp,fsdp_ep"])
    assert parallel.options_of().names == ["dp", "fsdp_ep"]
    monkeypatch.setattr(sys, "argv", ["parallel.py", "--modes", "dp,ddp"])
    with pytest.raises(SystemExit):
        parallel.options_of()
    assert "no mode ddp in dp, fsdp, tp" in capsys.readouterr().err
