# SPDX-License-Identifier: Apache-2.0
"""The settings of ``tests/conftest.py``, for the doctests in ``tessera/`` as well.

pytest reads ``tests/conftest.py`` only when something in ``tests/`` is asked for.
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parent / "tests" / "conftest.py"))
