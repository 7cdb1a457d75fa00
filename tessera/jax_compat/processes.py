# SPDX-License-Identifier: Apache-2.0
"""Wraps JAX's coordination service: a key-value store that all processes share.

It needs no device and no compiled program. Public JAX has none.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import jax._src.distributed
import jax._src.xla_bridge

_USED = (
    "key_value_set",
    "key_value_dir_get",
)


class Board:
    """The key-value store that all processes of the run share; see ``board``."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, text: str) -> None:
        """Write a text, replacing an earlier one."""
        self._client.key_value_set(key, text, allow_overwrite=True)

    def texts(self, folder: str) -> dict[str, str]:
        """The texts below a folder, by the rest of their keys."""
        prefix = f"{folder}/"
        entries = self._client.key_value_dir_get(prefix)
        return {key.rpartition(prefix)[2]: text for key, text in entries}


def board() -> Board | None:
    """The board of this run; None before JAX's processes are connected.

    None as well where this JAX has no such thing.
    """
    with suppress(AttributeError):
        client = jax._src.distributed.global_state.client
        if all(hasattr(client, name) for name in _USED):
            return Board(client)
    return None


def listen_on(host: str) -> None:
    """Make collectives between processes' CPU devices listen on one interface.

    By default they take the interface of the machine's own name, which may be reachable
    from outside, or, if it is the loopback interface, not from other machines.

    Args:
      host: This machine's own address.
    """
    with suppress(AttributeError):
        extension = jax._src.xla_bridge._jax
        make = extension.make_gloo_tcp_collectives
        make = getattr(make, "func", make)  # not one around another
        extension.make_gloo_tcp_collectives = partial(make, hostname=host)
