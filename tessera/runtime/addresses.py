# SPDX-License-Identifier: Apache-2.0
"""The address of rank 0: whether it is known, and free, and which interface listens.

A run on one machine is not seen from outside. One of several machines listens on the
interface that leads to the others, and on all of them only where none can be named.
"""

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

    Args:
      address: Host and port.

    Raises:
      CoordinatorError: [T705] another process listens there, or may not.
    """

    def __init__(self, address: Address) -> None:
        self.socket = _listening(address)

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


def bind_address(address: Address) -> Address | None:
    """Where rank 0 listens for an address: that one alone, or None for all interfaces.

    All of them where the address is not this machine's own, as behind a service of
    Kubernetes, or where its name leads to the loopback interface here, as a machine's
    own name does on Debian, and elsewhere to another.

    Raises:
      OSError: The host has no address.
    """
    host, port = address
    family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    own = str(found[0])
    if is_loopback(own) and not is_loopback(host):
        return None
    try:
        socket.create_server((own, 0), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return own, port


def address_towards(address: Address) -> str | None:
    """This machine's own address on the way to another; None if there is no way.

    Nothing is sent: the system only looks up the route.

    Example:
      >>> address_towards(("127.0.0.1", 29500))
      '127.0.0.1'
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(found)
            return str(towards.getsockname()[0])
    except OSError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address.

    Example:
      >>> is_loopback("127.0.0.1"), is_loopback("10.0.0.1")
      (True, False)
    """
    return host == "localhost" or host.startswith("127.") or host == "::1"


def host_and_port(address: Address) -> str:
    """An address as one text.

    Example:
      >>> host_and_port(("10.0.0.1", 80)), host_and_port(("::1", 80))
      ('10.0.0.1:80', '[::1]:80')
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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


def _listening(address: Address) -> socket.socket:
    try:
        where = bind_address(address)
        if where is None:
            return socket.create_server(("", address[1]), backlog=1024)
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        return socket.create_server(where, family=family, backlog=1024)
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        what = "is busy" if busy else "cannot be listened on"
        raise CoordinatorError(
            f"a port of rank 0 {what}",
            got=f"{host_and_port(address)}: "
            + (os.strerror(error.errno) if error.errno else str(error)),
            fix="end what listens there, if it is not this run, started before; or use "
            "another port (two in a row are taken): --master-port, or MASTER_PORT on "
            "every machine",
        ) from error
