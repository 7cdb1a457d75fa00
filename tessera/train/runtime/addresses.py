# SPDX-License-Identifier: Apache-2.0
"""Resolves and checks rank 0's address, and chooses the interface it listens on.

A run on one machine is not visible from outside. A run on several machines listens on
the interface that leads to the others, and on all of them only if none can be named.
"""

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Final

from tessera.errors import CoordinatorError
from tessera.train.runtime.cluster import Address

_RETRY_EVERY: Final = 0.5
_PATIENCE: Final = 1.0


def listen(address: Address) -> socket.socket:
    """A socket that listens at rank 0's address; a context manager that closes it.

    Raises:
      CoordinatorError: [T705] another process listens there, or it is not permitted.
    """
    try:
        bound = bind_address(address)
        host, port = bound or ("", address[1])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        what = "is busy" if busy else "cannot be listened on"
        raise CoordinatorError(
            f"a port of rank 0 {what}",
            got=f"{host_and_port(address)}: "
            + (os.strerror(error.errno) if error.errno else str(error)),
            fix="end what listens there, if it is not this run, started before; or use "
            "another port (two in a row are taken): MASTER_PORT on every machine",
        ) from error


def bind_address(address: Address) -> Address | None:
    """The local address at which rank 0 listens, or None for all interfaces.

    All interfaces if the address is not this machine's own, as behind a Kubernetes
    service, or if its name resolves to the loopback interface here and to something
    else elsewhere, as a machine's own name does on Debian.

    Raises:
      OSError: The host cannot be resolved.
    """
    host, port = address
    info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    family, resolved = info[0], str(info[4][0])
    if is_loopback(resolved) and not is_loopback(host):
        return None
    try:
        socket.create_server((resolved, 0), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return resolved, port


def address_towards(address: Address) -> str | None:
    """This machine's own address on the route to another; None if there is no route.

    Sends nothing: the system only looks up the route.

    Example:
      >>> address_towards(("127.0.0.1", 29500))
      '127.0.0.1'
    """
    try:
        info = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])
            return str(probe.getsockname()[0])
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
    """An address as text.

    Example:
      >>> host_and_port(("10.0.0.1", 80)), host_and_port(("::1", 80))
      ('10.0.0.1:80', '[::1]:80')
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def wait_for_host(host: str, until: float, report: Callable[[str], None]) -> None:
    """Wait until a host name resolves: a pod's name takes a while to be known.

    Args:
      host: A name, or an address, which needs no waiting.
      until: When to give up, by ``time.monotonic``.
      report: Shows a line to the person who waits.

    Raises:
      CoordinatorError: [T705] it does not resolve in time.
    """
    started, is_reported = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            if now >= until:
                raise CoordinatorError(
                    "the machine of rank 0 is not known by its name",
                    got=f"{host!r}: {error}, for {now - started:.0f} s",
                    fix="correct MASTER_ADDR, or use the machine's IP address",
                ) from error
            if not is_reported and now - started > _PATIENCE:
                report(f"the name {host!r} has no address yet: {error}")
                is_reported = True
            time.sleep(min(_RETRY_EVERY, max(until - now, 0.0)))
