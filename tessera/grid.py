# SPDX-License-Identifier: Apache-2.0
"""What a user gives for a mesh - axes, device ids, a shape - read into one grid.

Below :mod:`tessera.mesh`; pure arithmetic on names and numbers, with every mistake
in them told at once and the nearest legal values.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tessera.errors import DeviceIdError, DuplicateAxisError, MeshShapeError


def even_factors(number: int, count: int) -> tuple[int, ...]:
    """``number`` as ``count`` factors: the largest is the least possible, and so on.

    Example:
      >>> even_factors(16, 2), even_factors(72, 3), even_factors(7, 2)
      ((4, 4), (6, 4, 3), (7, 1))
    """
    if count == 1:
        return (number,)
    for first in range(1, number):
        if number % first == 0:
            rest = even_factors(number // first, count - 1)
            if rest[0] <= first:
                return (first, *rest)
    return (number, *(1,) * (count - 1))


def checked_axes(axes: Sequence[str] | str) -> tuple[str, ...]:
    """Axis names, each a proper name and used once.

    Raises:
      MeshShapeError: [T101] there is no axis.
      DuplicateAxisError: [T102] an axis name is repeated or is not a name.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names:
        raise MeshShapeError("a mesh has at least one axis", fix='write axes=["dp"]')
    if bad := [name for name in names if not isinstance(name, str) or not name]:
        raise DuplicateAxisError(
            "a mesh axis has no proper name",
            got=f"axes {names!r}: {bad[0]!r} is not a non-empty string",
            fix='name every axis, such as axes=["tp", "dp"]',
        )
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DuplicateAxisError(
            "a mesh names one axis twice",
            got=f"axes {names!r}: {', '.join(map(repr, repeated))} is repeated",
            fix="give every axis a name of its own",
        )
    return names


def checked_shape(shape: Sequence[int], axes: tuple[str, ...]) -> tuple[int, ...]:
    """One size per axis, of which one may be -1.

    Raises:
      MeshShapeError: [T101] a size is not one, or their number is not that of axes.
    """
    sizes = tuple(shape)
    whole = all(
        isinstance(s, (int, np.integer)) and not isinstance(s, bool) for s in sizes
    )
    if not whole or any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
        raise MeshShapeError(
            "axis sizes are positive whole numbers, and at most one is -1",
            got=f"shape {sizes!r}",
            fix="write sizes such as (4, 2), or (4, -1) to infer one",
        )
    if len(sizes) != len(axes):
        raise MeshShapeError(
            "a mesh has one size per axis",
            got=f"{len(axes)} axes {axes!r}, {len(sizes)} sizes {sizes!r}",
            fix=f"give {len(axes)} sizes, or {len(sizes)} axes",
        )
    return tuple(int(s) for s in sizes)


def read_devices(devices: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Flat ids of a nested sequence, and its nesting where it has any.

    Raises:
      MeshShapeError: [T101] the rows of the sequence differ in length.
      DeviceIdError: [T104] a device id is repeated or is not an id.

    Example:
      >>> read_devices([[0, 1], [2, 3]])
      ((0, 1, 2, 3), (2, 2))
    """
    if devices is None:
        return (), None
    if not is_sequence(devices):
        raise DeviceIdError(
            "devices is not a sequence of device ids",
            got=f"{devices!r}",
            fix="write devices=range(8), or a nested list such as [[0, 1], [2, 3]]",
        )
    shape = _nesting(devices)
    ids = tuple(_device_id(leaf) for leaf in _leaves(devices))
    if not ids:
        raise DeviceIdError(
            "a mesh has at least one device",
            got=f"devices={devices!r}",
            fix="list device ids, or leave devices out to take all there are",
        )
    if repeated := [i for i in dict.fromkeys(ids) if ids.count(i) > 1]:
        raise DeviceIdError(
            "a mesh holds one device twice",
            got=f"device ids {listed(ids)}: {listed(tuple(repeated))} repeated",
            fix="list every device once",
        )
    return ids, shape if len(shape) > 1 else None


def is_sequence(item: object) -> bool:
    """Whether something is a list, a tuple, a range or an array of items."""
    return isinstance(item, (Sequence, np.ndarray)) and not isinstance(item, str)


def _nesting(devices: Any) -> tuple[int, ...]:
    if not is_sequence(devices) or not len(devices):
        return (0,) if is_sequence(devices) else ()
    inner = {_nesting(item) for item in devices}
    if len(inner) > 1:
        raise MeshShapeError(
            "the nested device list is not a full grid",
            got=f"{devices!r}: rows of shapes "
            + " and ".join(str(shape) for shape in sorted(inner)),
            fix="give every row the same number of devices",
        )
    return (len(devices), *inner.pop())


def _leaves(devices: Any) -> Iterator[object]:
    for item in devices:
        yield from _leaves(item) if is_sequence(item) else (item,)


def _device_id(leaf: object) -> int:
    # A jax.Device, known by what it has: the trainer reads meshes without JAX.
    number = getattr(leaf, "id", None)
    if isinstance(number, int) and hasattr(leaf, "device_kind"):
        return number
    if isinstance(leaf, (int, np.integer)) and not isinstance(leaf, bool) and leaf >= 0:
        return int(leaf)
    raise DeviceIdError(
        "a device id is not a whole number from 0 up",
        got=f"{leaf!r}",
        fix="use the ids that jax.devices() shows, such as devices=range(8)",
    )


def fold(
    axes: tuple[str, ...],
    total: int,
    nesting: tuple[int, ...] | None,
    shape: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """Size of each axis for ``total`` devices.

    Raises:
      MeshShapeError: [T101] shape, nesting and number of devices disagree.
    """
    if shape is not None:
        sizes = inferred(axes, shape, total)
        if nesting is not None and nesting != sizes:
            raise MeshShapeError(
                "the nesting of devices and the shape disagree",
                got=f"devices nested {times(nesting)}, shape {times(sizes)}",
                fix="leave shape out, or give devices as a flat sequence",
            )
        return sizes
    if nesting is None:
        return even_factors(total, len(axes))
    if len(nesting) != len(axes):
        raise MeshShapeError(
            "the nesting of devices has one level per axis",
            got=f"{len(axes)} axes {axes!r}, devices nested {times(nesting)}",
            fix=f"name {len(nesting)} axes, or give devices as a flat sequence",
        )
    return nesting


def inferred(
    axes: tuple[str, ...], sizes: tuple[int, ...], total: int
) -> tuple[int, ...]:
    """Sizes with the -1 filled in; their product is the number of devices.

    Raises:
      MeshShapeError: [T101] no such product, with the nearest legal numbers.
    """
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and total % known == 0:
        return tuple(total // known if size == -1 else size for size in sizes)
    if -1 not in sizes and known == total:
        return sizes
    named = " × ".join(f"{a} {s}" for a, s in zip(axes, sizes, strict=True))
    low, high = total // known * known, -(-total // known) * known
    if -1 in sizes:
        got = f"{named}: {known} does not divide {total} devices"
        near = f"{low} or {high}" if low else f"{high}"
        fix = f"use {near} devices, or sizes whose product divides {total}"
    else:
        got = f"{named} = {known}, and {total} devices"
        even = " × ".join(str(size) for size in even_factors(total, len(axes)))
        fix = f"list {known} devices, or use a shape such as {even}"
    raise MeshShapeError("the shape does not hold the devices", got=got, fix=fix)


def times(sizes: tuple[int, ...]) -> str:
    """Sizes as a product: ``4 × 2``."""
    return " × ".join(str(size) for size in sizes)


def listed(ids: tuple[int, ...]) -> str:
    """Ids in few words: ``0..7`` where they run on."""
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}..{ids[-1]}"
    shown = [str(i) for i in ids]
    if len(shown) > 12:
        shown = [*shown[:6], "…", *shown[-5:]]
    return ", ".join(shown)
