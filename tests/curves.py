# SPDX-License-Identifier: Apache-2.0
"""The curve of a run: its metrics without those of the clock and the devices."""

import json
import re
from pathlib import Path
from typing import Any

_OF_THE_MACHINE = re.compile(r"second|wait|goodput|badput|communication")


def curve(folder: Path) -> list[dict[str, Any]]:
    """What a run learnt: of each line, what other devices leave as it is."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {
            name: value
            for name, value in line.items()
            if not _OF_THE_MACHINE.search(name)
        }
        for line in lines
    ]
