# SPDX-License-Identifier: Apache-2.0
"""A third door to JAX's internals: how the processes of a run reach each other.

JAX's coordinator keeps a store of texts and barriers with a time limit, which need no
device and no compiled program. Public JAX has neither: its barrier runs a program on
all devices, and waits for ever.
"""

import time
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax._src.distributed
import jax._src.xla_bridge

_USED = (
    "key_value_set",
    "key_value_dir_get",
    "wait_at_barrier",
)


class Board:
    """Texts that all processes of the run can read; ``board`` finds it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, text: str) -> None:
        """Write a text, over the one that was there."""
        self._client.key_value_set(key, text, allow_overwrite=True)

    def texts(self, folder: str) -> dict[str, str]:
        """The texts below a folder, by what their keys have after it."""
        prefix = f"{folder}/"
        found = self._client.key_value_dir_get(prefix)
        return {key.rpartition(prefix)[2]: text for key, text in found}

    def wait(self, name: str, seconds: float) -> bool:
        """Wait until all processes are here; False where not all come in time.

        Args:
          name: Of the barrier; each is used once.
          seconds: How long.
        """
        started = time.monotonic()
        try:
            self._client.wait_at_barrier(name, max(int(seconds * 1000), 1))
        except jax.errors.JaxRuntimeError:
            if time.monotonic() - started >= seconds * 0.9:
                return False
            raise
        return True


def board() -> Board | None:
    """The board of this run; None before JAX's processes are connected.

    None as well where this JAX has no such thing: then nothing can be compared after
    the start, which the caller says.
    """
    with suppress(AttributeError):
        client = jax._src.distributed.global_state.client
        if all(hasattr(client, name) for name in _USED):
            return Board(client)
    return None


def listen_on(host: str) -> None:
    """Let the collectives between processes' CPU devices listen on one interface.

    By default they take that of the machine's own name, which may be seen from outside,
    or, where the name leads to the loopback interface, be of no use to other machines.

    Args:
      host: This machine's own address.
    """
    with suppress(AttributeError):
        extension = jax._src.xla_bridge._jax
        make = extension.make_gloo_tcp_collectives
        make = getattr(make, "func", make)  # not one around another
        extension.make_gloo_tcp_collectives = partial(make, hostname=host)
