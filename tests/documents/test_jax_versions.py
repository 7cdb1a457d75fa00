# SPDX-License-Identifier: Apache-2.0
"""The page about versions of JAX has every module that uses JAX's internals."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/contributing/jax-versions.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE))
IMPORTED = re.compile(r"jax\._src(?:\.(\w+))?(?:\.\w+)*(?: import ([\w, ]+))?")


def test_every_door_has_a_row_that_names_what_it_imports():
    doors = [*(ROOT / "tessera/jax_compat").glob("[!_]*.py")]
    assert {path.stem for path in doors} == set(ROWS)
    for path in doors:
        row = ROWS[path.stem]
        for module, names in IMPORTED.findall(path.read_text()):
            for part in (module or names).split(","):
                name = part.partition(" as ")[0].strip()
                assert f"`{name}" in row or f".{name}" in row, f"{path.stem}: {name}"


def test_the_tests_that_notice_are_there():
    named = re.findall(
        r"`([\w/]+\.py)`", " ".join(r.split("|")[-1] for r in ROWS.values())
    )
    assert len(named) > 15
    for name in named:
        assert (ROOT / "tests" / name).is_file(), name
