# SPDX-License-Identifier: Apache-2.0
"""How a process ends before Python would end it: at once, or when its time is over.

Python's own end waits: for JAX's connections, for other threads, and for a second or
more until everything is freed.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

# For last words, and to give back what is held: a reader may be gone, a disk slow.
_PATIENCE: Final = 2.0
_MONOTONIC: Final = 1
_IN_A_THREAD: Final = 2

_held: Final[list[Callable[[], None]]] = []


def leave(code: int, text: str = "") -> NoReturn:
    """End the process at once, from any thread.

    Args:
      code: What it exits with.
      text: Its last words, on standard error.
    """
    ending = threading.Thread(target=_end_in_order, args=(text,), daemon=True)
    with suppress(RuntimeError):  # the interpreter is at its own end
        ending.start()
        ending.join(_PATIENCE)
    os._exit(code)


@contextmanager
def at_end(act: Callable[[], None]) -> Iterator[None]:
    """Do something after a ``with`` block, also where ``leave`` ends the process in it.

    Args:
      act: Called once, from any thread.
    """
    _held.append(act)
    try:
        yield
    finally:
        _held.remove(act)
        act()


class Deadline:
    """The time by which the process is to be gone, whatever it does then.

    On Linux, the system's clock and a thread without Python keep it: they end a call
    that holds the interpreter's lock, and the interpreter's own end. Elsewhere nobody
    keeps it.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None

    def set(self, seconds: float, code: int) -> None:
        """End the process after some seconds; takes the place of what was set before.

        Args:
          seconds: From now.
          code: What it then exits with.
        """
        self.clear()
        system = ctypes.CDLL(None)
        if not hasattr(system, "timer_create") or ctypes.sizeof(ctypes.c_void_p) != 8:
            return
        event = _Event(
            value=code,
            notify=_IN_A_THREAD,
            function=ctypes.cast(system._exit, ctypes.c_void_p),
        )
        timer = ctypes.c_void_p()
        if system.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            return
        whole = int(seconds)
        after = _Times(seconds=whole, nanoseconds=int((seconds - whole) * 1e9) or 1)
        system.timer_settime(timer, 0, ctypes.byref(after), None)
        self._timer = timer

    def clear(self) -> None:
        """Let the process live on."""
        timer, self._timer = self._timer, None
        if timer is not None:
            ctypes.CDLL(None).timer_delete(timer)


class _Event(ctypes.Structure):
    """``struct sigevent`` of 64-bit Linux; the value is the argument of the call."""

    _fields_ = (
        ("value", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec``: an interval, which is none, and when."""

    _fields_ = (
        ("every_seconds", ctypes.c_long),
        ("every_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


def _end_in_order(text: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # Nobody may read it any more: that must not keep the process from its end.
            with suppress(OSError, ValueError):
                stream.flush()
    left = text.encode(errors="backslashreplace")
    with suppress(OSError):
        while left:
            left = left[os.write(2, left) :]
    for act in reversed(_held):
        with suppress(Exception):
            act()
