# SPDX-License-Identifier: Apache-2.0
"""Layouts are rejected as a run with them would be, and no check is made twice."""

from dataclasses import replace
from functools import cache

import pytest

from tessera.foundations.config_files import configs_dir
from tessera.train.config.command_line import compose
from tessera.train.planner import layout_legality as legality_module
from tessera.train.planner.layout import Layout
from tessera.train.planner.layout_legality import Legality

WORDS = ("data=synthetic", "training.sequence_length=72")


@cache
def legality(*words: str) -> Legality:
    return Legality(compose([*WORDS, *words], configs_dir()).config)


FSDP = Layout((("fsdp", 4),), 8, 1)
FINE = (
    *("training.numerics=deterministic", "training.reduction_parts=16"),
    "training.micro_batch_size=16",
)
PIPELINE = Layout((("pp", 2), ("fsdp", 2)), 2, 8, schedule="1f1b")


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        (FSDP, None),
        (PIPELINE, None),
        (replace(PIPELINE, schedule="interleaved", chunks=2), None),
        (replace(PIPELINE, schedule="interleaved", chunks=2, microbatches=3), "T311"),
        (replace(PIPELINE, schedule="interleaved", chunks=8), "T311"),  # of 6 layers
        (replace(PIPELINE, schedule="interleaved"), "T507"),
        (replace(PIPELINE, mesh=(("pp", 8),), microbatches=2**18), "T311"),
        (replace(FSDP, mesh=(("tp", 16),)), "T402"),  # of 4 heads
        (replace(FSDP, mesh=(("cp", 128),)), "T503"),  # of 72 tokens
        (replace(FSDP, sequence_parallel=True), "T507"),
        (replace(FSDP, mesh=(("cp", 4), ("tp", 4))), None),
        (replace(FSDP, mesh=(("cp", 4), ("tp", 4)), sequence_parallel=True), "T503"),
        (replace(FSDP, remat="some"), "T502"),
        (replace(FSDP, remat=["full", "none"]), "T502"),  # of 6 layers
        (replace(FSDP, micro_batch_size=2**20, microbatches=2**30), "T502"),
    ],
)
def test_a_layout_is_rejected_by_the_checks_of_a_run(layout, code):
    problem = legality().problem(layout)
    assert (problem and problem.code) == code


@pytest.mark.parametrize(
    ("words", "layout", "code"),
    [
        (("training.numerics=deterministic",), replace(FSDP, loss_chunk=256), "T507"),
        (("training.numerics=deterministic",), PIPELINE, "T503"),  # 4 rows at a time
        (FINE, PIPELINE, None),
        (FINE, replace(PIPELINE, schedule="gpipe"), "T507"),
        (
            ("training.numerics=deterministic",),
            replace(FSDP, mesh=(("fsdp", 4), ("tp", 4))),
            "T507",  # 16 devices share 8 parts
        ),
    ],
)
def test_settings_of_the_run_reject_layouts(words, layout, code):
    problem = legality(*words).problem(layout)
    assert (problem and problem.code) == code


def test_layouts_that_a_check_cannot_tell_apart_share_its_result(monkeypatch):
    asked = []

    def model_problems(config):
        asked.append(config.model.mesh_shape)
        return []

    monkeypatch.setattr(legality_module, "model_problems", model_problems)
    fresh = Legality(legality().config)
    for remat in ("none", "dots", "full"):
        for micro in (1, 2, 4):
            layout = replace(FSDP, remat=remat, micro_batch_size=micro)
            assert fresh.problem(layout) is None
    assert asked == [((4,), ("fsdp",))]
