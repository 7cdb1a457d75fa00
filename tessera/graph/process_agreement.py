# SPDX-License-Identifier: Apache-2.0
"""Sees that all processes make a call with the same arrays of the host.

What is no global array, NumPy's or one on the devices of its process, is taken as the
whole value, of which each device gets its block. A process that passes its own part of
a batch would lose the rest of it without a word, and one with weights of its own would
train these. JAX refuses such arrays, whatever they hold.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tessera.errors import RanksDifferError
from tessera.graph.compile_stages import Traced
from tessera.graph.tracer.arguments import Call
from tessera.graph.tracer.static_values import ATOMS

_LONGEST = 2**16
_MOST_NAMES = 10


def check_processes(call: Call, traced: Traced) -> None:
    """Compare what the processes pass, if the program spans all of them.

    It is collective, and made once for each program and kind of call.

    Args:
      call: The call, with the values of this process.
      traced: The program, which may close over arrays.

    Raises:
      RanksDifferError: [T707] names the arguments that differ.
    """
    mesh = traced.graph.mesh
    if mesh is None:
        return
    places = {device.process_index for device in mesh.jax.devices.flat}
    if len(places) < jax.process_count():
        return  # the others are not here
    own = dict(_local_values(call, traced))
    text = "\n".join(f"{name}\t{form}" for name, form in own.items()).encode()
    sums = multihost_utils.process_allgather(np.uint32(zlib.crc32(text)))
    if len({*sums.tolist()}) == 1:
        return
    padded = np.frombuffer(text[:_LONGEST].ljust(_LONGEST, b"\n"), np.uint8)
    texts = [row.tobytes() for row in multihost_utils.process_allgather(padded)]
    lines = [{*each.decode(errors="replace").splitlines()} for each in texts]
    others = set.union(*lines) - set.intersection(*lines)
    names = sorted({line.partition("\t")[0] for line in others})
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    raise RanksDifferError(
        f"processes call {traced.fun_name!r} with different arrays or numbers",
        got=f"{', '.join(names[:_MOST_NAMES])}{more}: each process has its own, which "
        "would be taken as the whole",
        fix="a part of a batch: jax.make_array_from_process_local_data(sharding, part)"
        "\nwhat all should have alike: read, draw or broadcast it in the same way",
    )


def _local_values(call: Call, traced: Traced) -> Iterator[tuple[str, str]]:
    """The names of the values that only this process has, with what they are."""
    found = [(leaf.name, leaf.value) for leaf in call.leaves]
    for each in call.arguments:
        found += [(each.leaf_names[i], static.value) for i, static in each.statics]
    captured = enumerate(traced.graph.captured)
    found += [(f"closed-over array {number}", array) for number, array in captured]
    for name, value in found:
        if _is_local(value):
            yield name, _form(value)


def _is_local(value: Any) -> bool:
    """Whether a value is of one process, and no global array."""
    if isinstance(value, jax.Array):
        return value.is_fully_addressable
    return isinstance(value, np.ndarray | np.generic) or type(value) in ATOMS


def _form(value: Any) -> str:
    if type(value) in ATOMS:
        return repr(value)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)} {zlib.crc32(array.tobytes())}"
