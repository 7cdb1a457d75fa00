# SPDX-License-Identifier: Apache-2.0
"""The curve of a run: its metrics without those that depend on the clock."""

import json
import re
from pathlib import Path
from typing import Any

_CLOCK = re.compile(r"second|wait|goodput|badput|slowest_rank")


def curve(folder: Path) -> list[dict[str, Any]]:
    """What a run learnt: each line of its numbers, which no clock changes."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if not _CLOCK.search(name)}
        for line in lines
    ]
