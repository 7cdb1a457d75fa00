# SPDX-License-Identifier: Apache-2.0
"""Seeds of the fuzz tests: a small sample by default, all of them by ``make fuzz``.

A fuzz test takes an argument ``seed`` and says how many seeds it has:

    @pytest.mark.fuzz(sample=20, whole=2000)
    def test_programs_give_what_python_gives(seed): ...

``make test`` runs a fifth of the sample, ``make test-all`` the sample.
``TESSERA_FUZZ=whole`` runs all of them, ``TESSERA_FUZZ=100:150`` those from 100 to 149.
"""

import os

import pytest


def seeds(sample: int, whole: int) -> list[object]:
    """The seeds that ``TESSERA_FUZZ`` asks for, as parameters."""
    asked = os.environ.get("TESSERA_FUZZ", "")
    if not asked:
        fast = -(-sample // 5)
        rest = range(fast, sample)
        return [*range(fast), *(pytest.param(s, marks=pytest.mark.full) for s in rest)]
    if asked == "whole":
        return [*range(whole)]
    first, _, last = asked.partition(":")
    return [*range(int(first), int(last))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("fuzz")
    if marker is not None:
        metafunc.parametrize("seed", seeds(**marker.kwargs))
