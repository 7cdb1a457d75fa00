# SPDX-License-Identifier: Apache-2.0
"""Writes the report of a run when it ends, however it ends."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tessera.train.loop.run_folder import RunFolder

_log: Final = logging.getLogger("tessera")


@contextmanager
def reported(folder: RunFolder | None) -> Iterator[None]:
    """Write ``report.html`` after a ``with`` block, also one that raises.

    A report that cannot be written is a warning: it is no reason for a run to fail, nor
    to hide why it did.

    Args:
      folder: The run's; None writes nothing.
    """
    try:
        yield
    finally:
        if folder is not None:
            try:
                # Here, as only a run that ends needs it.
                from tessera.train.report.page import write_report

                folder.check()
                write_report([folder.path], folder.report)
            except Exception as error:
                _log.warning("the report was not written: %s", error)
