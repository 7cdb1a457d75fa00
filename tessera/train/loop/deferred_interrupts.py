# SPDX-License-Identifier: Apache-2.0
"""Defers Ctrl-C in a notebook while a step replaces the training state.

A step donates the state that it is given. A ``KeyboardInterrupt`` after that, and
before the new state has a name, would leave neither.
"""

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from tessera.train.runtime.exit_codes import handled_signals


class Interrupts:
    """Handles Ctrl-C for a loop that cannot be interrupted everywhere.

    A program that handles SIGINT itself keeps its handler.
    """

    def __init__(self) -> None:
        self._is_deferred = self._is_pending = False

    def handled(self) -> AbstractContextManager[None]:
        """Handle Ctrl-C for the length of a ``with`` block."""
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return handled_signals([signal.SIGINT] if is_ours else [], self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise ``KeyboardInterrupt`` after a ``with`` block instead of in it."""
        self._is_deferred = True
        try:
            yield
        except BaseException:
            self._is_deferred = self._is_pending = False
            raise
        self._is_deferred = False
        is_pending, self._is_pending = self._is_pending, False
        if is_pending:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferred:
            self._is_pending = True
        else:
            raise KeyboardInterrupt
