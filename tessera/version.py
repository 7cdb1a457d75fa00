# SPDX-License-Identifier: Apache-2.0
"""The version of the installed package: ``tessera.__version__``."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tessera-spmd")
except PackageNotFoundError:  # imported from a folder that was never installed
    __version__ = "0+unknown"
