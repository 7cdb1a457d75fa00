# SPDX-License-Identifier: Apache-2.0
"""Strategies and stages that do not exist, and what the errors say."""

from typing import Any

import pytest

import tessera as ts
from tessera.errors import (
    StrategyError,
)


def message(kind: type[Exception], action: Any) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def test_a_function_in_place_of_a_strategy_is_refused():
    step = ts.function(lambda weights: weights)
    for function in (step, lambda x: x):
        assert 'fix: ts.distribute("data_parallel")(step)' in message(
            StrategyError, lambda f=function: ts.distribute(f)
        )


def test_an_unknown_strategy_gets_a_hint():
    assert message(StrategyError, lambda: ts.distribute("data_paralel")) == (
        "[T313] there is no strategy 'data_paralel'\n"
        "  fix: did you mean 'data_parallel'? Known: 'data_parallel', 'fsdp', "
        "'zero_redundancy_optimizer', 'tensor_parallel', 'pipeline_parallel', "
        "'expert_parallel'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T313.html"
    )


@pytest.mark.parametrize(
    ("strategy", "stage", "fix"),
    [
        ("zero_redundancy_optimizer", 4, "use stage=1, 2 or 3"),
        ("zero_redundancy_optimizer", 0, "use stage=1, 2 or 3"),
        (
            "fsdp",
            3,
            "leave it out, or use strategy='zero_redundancy_optimizer'",
        ),
    ],
)
def test_a_stage_that_does_not_exist_is_refused(strategy, stage, fix):
    assert message(StrategyError, lambda: ts.distribute(strategy, stage=stage)) == (
        f"[T313] strategy {strategy!r} has no such stage\n"
        f"  got: stage={stage}\n"
        f"  fix: {fix}\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T313.html"
    )
