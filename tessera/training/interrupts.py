# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a person trains in a notebook: never between the old state and the new.

A step donates the state that it is given. An exception after that, and before the new
state has a name, would leave neither.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Shield:
    """Moments that Ctrl-C waits for: ``with shield:``.

    Only while it is ``raised``, where Ctrl-C raises ``KeyboardInterrupt``. A program
    that handles SIGINT itself keeps its handler.
    """

    def __init__(self) -> None:
        self._is_up = self._is_pending = False

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Be the handler of Ctrl-C for the length of a ``with`` block."""
        is_ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if is_ours:
            signal.signal(signal.SIGINT, self._take)
        try:
            yield
        finally:
            if is_ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> None:
        self._is_up = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_up = False
        was_pending, self._is_pending = self._is_pending, False
        if was_pending and error is None:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._is_up:
            self._is_pending = True
        else:
            raise KeyboardInterrupt
