# SPDX-License-Identifier: Apache-2.0
"""What ``docs/contributing/fault-tests.md`` says was tried is what the tests try."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/contributing/fault-tests.md"


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"`([\w/]+): (\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert len(named) > 50
    whole = re.findall(r"`((?:\w+/)*test_\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert [f for f in whole if not (ROOT / "tests" / f"{f}.py").exists()] == []
    for file, begins in named:
        source = (ROOT / "tests" / f"{file}.py").read_text()
        assert f"\ndef test_{begins}" in source, f"{file}: {begins}"
