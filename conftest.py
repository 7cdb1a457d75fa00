# SPDX-License-Identifier: Apache-2.0
"""The settings of ``tests/conftest.py``, for the doctests in ``tessera/`` as well.

pytest reads ``tests/conftest.py`` only when something in ``tests/`` is asked for.
"""

import os
import random
import runpy
from pathlib import Path

import pytest

pytest_plugins = ["tests.cpu_seconds"]

runpy.run_path(str(Path(__file__).parent / "tests" / "conftest.py"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests of each, by the seed in ``TESSERA_TEST_ORDER``.

    A file's tests stay together, so that its fixtures are made once.
    """
    seed = os.environ.get("TESSERA_TEST_ORDER")
    if seed is None:
        return
    draw = random.Random(seed)
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    files = list(by_file.values())
    draw.shuffle(files)
    for tests in files:
        draw.shuffle(tests)
    items[:] = [item for tests in files for item in tests]
