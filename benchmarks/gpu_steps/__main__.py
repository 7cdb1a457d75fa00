# SPDX-License-Identifier: Apache-2.0
"""One step in this process: ``python -m gpu_steps MODULE:FUNCTION``."""

import importlib
import sys


def main(target: str) -> None:
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main(sys.argv[1])
