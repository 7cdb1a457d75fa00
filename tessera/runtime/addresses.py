# SPDX-License-Identifier: Apache-2.0
"""The address of rank 0: whether it is known, and whether its ports are free."""

import errno
import os
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from tessera.errors import CoordinatorError
from tessera.runtime.cluster import Address

_PAUSE: Final = 0.5
_PATIENCE: Final = 1.0


class Listener:
    """A socket that listens where rank 0 is; closed by the end of ``with``.

    On an address that is this machine's own, on that one alone: a run on the loopback
    interface is not seen from outside. On all where it is none, as behind the address
    of a service of Kubernetes.

    Args:
      address: Host and port.

    Raises:
      CoordinatorError: [T705] another process listens there, or may not.
    """

    def __init__(self, address: Address) -> None:
        host, port = address
        self.socket = _listening(host, port, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()


def check_port(address: Address) -> None:
    """See that JAX's coordinator will be able to listen.

    Raises:
      CoordinatorError: [T705] another process listens there, or may not.
    """
    with Listener(address):
        pass


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address.

    Example:
      >>> is_loopback("127.0.0.1"), is_loopback("10.0.0.1")
      (True, False)
    """
    return host == "localhost" or host.startswith("127.") or host == "::1"


def find_host(host: str, until: float, say: Callable[[str], None]) -> None:
    """Wait until a host has an address: that of a pod takes a while to be known.

    Args:
      host: A name, or an address, which is known at once.
      until: When to give up, by ``time.monotonic``.
      say: Shows a line to a person who waits.

    Raises:
      CoordinatorError: [T705] it has none.
    """
    started, told = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            if now >= until:
                raise CoordinatorError(
                    "the machine of rank 0 is not known by its name",
                    got=f"{host!r}: {error}, for {now - started:.0f} s",
                    fix="correct --master-addr or MASTER_ADDR, or use the machine's "
                    "IP address",
                ) from error
            if not told and now - started > _PATIENCE:
                say(f"the name {host!r} has no address yet: {error}")
                told = True
            time.sleep(min(_PAUSE, max(until - now, 0.0)))
        else:
            return


def _listening(host: str, port: int, address: Address) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server((where[0], port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            try:
                return socket.create_server(("", port), backlog=1024)
            except OSError as other:
                error = other
        busy = error.errno == errno.EADDRINUSE
        what = "is busy" if busy else "cannot be listened on"
        raise CoordinatorError(
            f"a port of rank 0 {what}",
            got=f"{address[0]}:{address[1]}: "
            + (os.strerror(error.errno) if error.errno else str(error)),
            fix="end what listens there, if it is not this run, started before; or use "
            "another port (two in a row are taken): --master-port, or MASTER_PORT on "
            "every machine",
        ) from error
