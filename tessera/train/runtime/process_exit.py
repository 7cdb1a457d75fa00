# SPDX-License-Identifier: Apache-2.0
"""Ends the process without Python's own shutdown: at once, or at a deadline.

Python's shutdown waits for JAX's connections, for other threads, and a second or more
for everything to be freed.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

# For output and cleanup: a pipe may have no reader, a disk may be slow.
_PATIENCE: Final = 2.0
_CLOCK_MONOTONIC: Final = 1
_SIGEV_THREAD: Final = 2

_callbacks: Final[list[Callable[[], None]]] = []


def exit_now(code: int, text: str = "") -> NoReturn:
    """End the process at once, from any thread, after the ``on_exit`` callbacks.

    Args:
      code: The exit code.
      text: Written to standard error last.
    """
    cleanup = threading.Thread(target=_clean_up, args=(text,), daemon=True)
    with suppress(RuntimeError):  # the interpreter is already shutting down
        cleanup.start()
        cleanup.join(_PATIENCE)
    os._exit(code)


@contextmanager
def on_exit(callback: Callable[[], None]) -> Iterator[None]:
    """Call back at the end of a ``with`` block, also if ``exit_now`` ends it.

    Args:
      callback: Called once, from any thread.
    """
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)
        callback()


class Deadline:
    """A time at which the kernel ends the process, whatever it is doing.

    A POSIX timer calls ``_exit`` in a thread without Python, so it also ends a call
    that holds the interpreter's lock, and the interpreter's own shutdown. The standard
    library has nothing that does: ``faulthandler.dump_traceback_later(exit=True)`` has
    one exit code, 1, and ``signal.setitimer`` waits for the interpreter. On systems
    other than 64-bit Linux nothing enforces the deadline.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None

    def set(self, seconds: float, code: int) -> None:
        """End the process after some seconds; replaces an earlier deadline.

        Args:
          seconds: From now.
          code: The exit code.
        """
        self.clear()
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "timer_create") or ctypes.sizeof(ctypes.c_void_p) != 8:
            return
        event = _SigEvent(
            value=code,
            notify=_SIGEV_THREAD,
            function=ctypes.cast(libc._exit, ctypes.c_void_p),
        )
        timer = ctypes.c_void_p()
        if libc.timer_create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)
        ):
            return
        whole = int(seconds)
        # No interval: it expires once.
        spec = (ctypes.c_long * 4)(0, 0, whole, int((seconds - whole) * 1e9) or 1)
        libc.timer_settime(timer, 0, spec, None)
        self._timer = timer

    def clear(self) -> None:
        """Remove the deadline."""
        timer, self._timer = self._timer, None
        if timer is not None:
            ctypes.CDLL(None).timer_delete(timer)


class _SigEvent(ctypes.Structure):
    """``struct sigevent`` of 64-bit Linux; the value is the function's argument."""

    _fields_ = (
        ("value", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


def _clean_up(text: str) -> None:
    # A pipe without a reader must not keep the process from ending.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    unwritten = text.encode(errors="backslashreplace")
    with suppress(OSError):
        while unwritten:
            unwritten = unwritten[os.write(2, unwritten) :]
    for callback in reversed(_callbacks):
        with suppress(Exception):
            callback()
