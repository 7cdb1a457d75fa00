# SPDX-License-Identifier: Apache-2.0
"""Parses the arguments of a mesh: axes, device ids and shape.

Used by :mod:`tessera.mesh`; pure arithmetic on names and numbers. Errors list every
problem, with the nearest legal values.
"""

import functools
import heapq
import math
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from tessera.errors import DeviceIdError, DuplicateAxisError, MeshShapeError

# Axes that shard the rows of a batch, outermost first.
DATA_AXES = ("dp", "fsdp")
# Axes that shard a model: its widths, layers, experts or sequences.
MODEL_AXES = ("tp", "pp", "ep", "ep_outer", "cp", "sp")

# No machine has more. A larger number is a mistake that would fill the memory.
MAX_DEVICES = 2**20
# The maximum rank of NumPy arrays in the oldest version that JAX supports.
MAX_AXES = 32

_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = 16


def even_sizes(axes: tuple[str, ...], total: int) -> tuple[int, ...]:
    """Sizes of axes for a number of devices, by the names of the axes alone.

    Powers of two divide the widths, layers and experts of models, while a batch can
    have any number of rows. So the size of an axis in ``MODEL_AXES`` is a power of two,
    and that of any other axis is arbitrary. If all axes shard a model, the first one
    has an arbitrary size. Among all such sizes these are the most even: the largest is
    minimal, then the second largest, and so on; ties put larger sizes first.

    Args:
      axes: Names of axes.
      total: Number of devices.

    Example:
      >>> even_sizes(("tp", "dp"), 16), even_sizes(("tp", "pp", "dp"), 72)
      ((4, 4), (4, 2, 9))
      >>> even_sizes(("x", "y"), 12), even_sizes(("tp", "dp"), 7)
      ((4, 3), (1, 7))
    """
    powers = [axis in MODEL_AXES for axis in axes]
    if all(powers):
        powers[0] = False
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    divisors = {d for low in small for d in (low, total // low)}

    @functools.cache
    def sizes(first: int, left: int) -> tuple[int, ...] | None:
        """The most even sizes of ``axes[first:]`` for ``left`` devices."""
        if first == len(axes):
            return () if left == 1 else None
        candidates = [
            (size, *rest)
            for size in divisors
            if left % size == 0
            and (not powers[first] or size & (size - 1) == 0)
            and (rest := sizes(first + 1, left // size)) is not None
        ]
        return min(candidates, key=_unevenness, default=None)

    best = sizes(0, total)
    assert best is not None, "one axis has an arbitrary size"
    return best


def _unevenness(sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    return sorted(sizes, reverse=True), [-size for size in sizes]


def checked_axes(axes: Sequence[str] | str) -> tuple[str, ...]:
    """Check axis names: non-empty strings without duplicates.

    Raises:
      MeshShapeError: [T101] there is no axis, or there are too many.
      DuplicateAxisError: [T102] an axis name is repeated or is not a name.
    """
    if not isinstance(axes, (str, Iterable)):
        raise DuplicateAxisError(
            "a mesh is declared by the names of its axes",
            got=f"a {type(axes).__name__}",
            fix="write dist.Mesh(axes=[...], shape=(...)), or dist.Mesh.of(mesh) for a "
            "mesh of JAX",
        )
    names = (axes,) if isinstance(axes, str) else islice(axes, MAX_AXES + 1)
    names = tuple(names)
    if not names:
        raise MeshShapeError("a mesh has at least one axis", fix='write axes=["dp"]')
    if len(names) > MAX_AXES:
        raise MeshShapeError(
            f"a mesh has at most {MAX_AXES} axes",
            got=f"more than {MAX_AXES}: {_REPR.repr(names)}",
            fix="leave out axes of size 1, or join some into one",
        )
    if bad := [name for name in names if not isinstance(name, str) or not name]:
        raise DuplicateAxisError(
            "a mesh axis has no proper name",
            got=f"axes {_REPR.repr(names)}: {_REPR.repr(bad[0])} is not a non-empty "
            "string",
            fix='name every axis, before its size: axes=["tp", "dp"], shape=(4, 2)',
        )
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DuplicateAxisError(
            "a mesh names one axis twice",
            got=f"axes {names!r}: {', '.join(map(repr, repeated))} is repeated",
            fix="give every axis a name of its own",
        )
    return names


def checked_shape(shape: Sequence[int], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Check sizes: one per axis, of which one may be -1.

    Raises:
      MeshShapeError: [T101] a size is illegal, their number is not that of axes, or
        their product is above ``MAX_DEVICES``.
    """
    sizes = tuple(islice(shape, MAX_AXES + 1))
    whole = [abs(int(s)) or 1 for s in sizes if isinstance(s, (int, np.integer))]
    _check_count(math.prod(whole), "shape")
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


def read_devices(devices: Any) -> tuple[Sequence[int], tuple[int, ...] | None]:
    """The flat ids of a sequence, and its shape if it is nested; a range as it is.

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
    if isinstance(devices, range) and devices == range(_length(devices) or 1):
        _check_count(_length(devices), "devices")
        return devices, None
    leaves, shape = _flattened(devices)
    ids = tuple(map(_device_id, leaves))
    if not ids:
        raise DeviceIdError(
            "a mesh has at least one device",
            got=f"devices={_REPR.repr(devices)}",
            fix="list device ids, or leave devices out to take all there are",
        )
    if repeated := [i for i, count in Counter(ids).items() if count > 1]:
        raise DeviceIdError(
            "a mesh holds one device twice",
            got=f"device ids {listed(ids)}: {listed(tuple(repeated))} repeated",
            fix="list every device once",
        )
    return ids, shape if len(shape) > 1 else None


def is_sequence(item: object) -> bool:
    """Whether something is a list, a tuple, a range or an array of items."""
    return isinstance(item, (Sequence, np.ndarray)) and not isinstance(item, str)


def _flattened(devices: Any) -> tuple[list[Any], tuple[int, ...]]:
    """The items of a nested sequence, and the length of each level."""
    level, shape = [devices], list[int]()
    # Test one item of each type: there may be a million items.
    while any(map(is_sequence, {type(item): item for item in level}.values())):
        lengths = sorted({_length(item) if is_sequence(item) else 0 for item in level})
        if len(lengths) > 1:
            rows = " and ".join(map(str, lengths[:4]))
            raise MeshShapeError(
                "the nested device list is not a full grid",
                got=f"{_REPR.repr(devices)}: rows of {rows} devices",
                fix="give every row the same number of devices",
            )
        if len(shape) == MAX_AXES:
            raise MeshShapeError(
                "devices are nested deeper than a mesh has axes",
                got=f"more than {MAX_AXES} levels",
                fix="give one level for each axis",
            )
        shape.append(lengths[0])
        _check_count(math.prod(shape), "devices")
        level = list(chain.from_iterable(level))
    return level, tuple(shape)


def _length(items: Any) -> int:
    if isinstance(items, range):  # len() fails above sys.maxsize
        return max(0, -((items.start - items.stop) // items.step))
    return len(items)


def _check_count(count: int, what: str) -> None:
    if count <= MAX_DEVICES:
        return
    # Python refuses to print numbers of thousands of digits.
    text = f"{count:,}" if count < 10**30 else f"10^{math.log10(count):.0f}"
    raise MeshShapeError(
        f"a mesh has at most {MAX_DEVICES:,} devices",
        got=f"{what} of {text} devices",
        fix="check the sizes: they multiply to the number of devices",
    )


def _device_id(leaf: object) -> int:
    # A jax.Device, recognized by its attributes: configurations do not import JAX.
    number = getattr(leaf, "id", None)
    if isinstance(number, int) and hasattr(leaf, "device_kind"):
        return number
    whole = isinstance(leaf, (int, np.integer)) and not isinstance(leaf, bool)
    if whole and 0 <= leaf < 2**31:
        return int(leaf)
    large = whole and leaf > 0
    raise DeviceIdError(
        "a device id is not a whole number from 0 up",
        got="a number of more than 31 bits" if large else f"{leaf!r}",
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
        return even_sizes(axes, total)
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
    """Sizes with the -1 replaced; their product is the number of devices.

    Raises:
      MeshShapeError: [T101] no such product, with the nearest legal numbers.
    """
    product = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and total % product == 0:
        return tuple(total // product if size == -1 else size for size in sizes)
    if -1 not in sizes and product == total:
        return sizes
    named = " × ".join(f"{a} {s}" for a, s in zip(axes, sizes, strict=True))
    low, high = total // product * product, -(-total // product) * product
    shapes = " or ".join(map(times, nearest_shapes(axes, sizes, total)))
    if -1 in sizes:
        got = f"{named}: {product} does not divide {total} devices"
        near = f"{low} or {high}" if low else f"{high}"
        fix = f"use the shape {shapes}, or {near} devices"
    else:
        got = f"{named} = {product}, and {total} devices"
        fix = f"use the shape {shapes}, or list {product} devices"
    raise MeshShapeError("the shape does not hold the devices", got=got, fix=fix)


def nearest_shapes(
    axes: tuple[str, ...], sizes: Sequence[int], total: int, count: int = 2
) -> list[tuple[int, ...]]:
    """The shapes for a number of devices that are nearest to one for another number.

    Axes that shard a model get powers of two, if there are such shapes. Of these, those
    come first that keep the most sizes, then those whose sizes are the fewest times
    larger or smaller.

    Args:
      axes: Names of axes.
      sizes: The size of each; -1 may become any.
      total: Number of devices.
      count: How many shapes at most.

    Example:
      >>> nearest_shapes(("fsdp", "tp"), (3, 2), 64)
      [(32, 2), (8, 8)]
    """
    if len(axes) > 4:  # too many products to compare
        return [even_sizes(axes, total)]

    def distance(shape: tuple[int, ...]) -> tuple[int, int, float, float]:
        widths = [a for axis, a in zip(axes, shape, strict=True) if axis in MODEL_AXES]
        pairs = [(a, b) for a, b in zip(shape, sizes, strict=True) if b != -1]
        ratios = [abs(math.log(a / b)) for a, b in pairs]
        return (
            sum(size & (size - 1) != 0 for size in widths),
            sum(a != b for a, b in pairs),
            round(sum(ratios), 6),  # many shapes are equally far but for rounding
            max(ratios, default=0),
        )

    return heapq.nsmallest(count, _products(total, len(axes)), key=distance)


def _products(total: int, length: int) -> Iterator[tuple[int, ...]]:
    """All tuples of positive numbers with a product."""
    if length == 1:
        yield (total,)
        return
    for low in range(1, math.isqrt(total) + 1):
        for first in {low, total // low} if total % low == 0 else ():
            yield from (
                (first, *rest) for rest in _products(total // first, length - 1)
            )


def times(sizes: tuple[int, ...]) -> str:
    """Sizes as a product: ``4 × 2``."""
    return " × ".join(str(size) for size in sizes)


def listed(ids: tuple[int, ...]) -> str:
    """Ids in short: ``0..7`` if they are consecutive."""
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}..{ids[-1]}"
    texts = [str(i) for i in ids]
    if len(texts) > 12:
        texts = [*texts[:6], "…", *texts[-5:]]
    return ", ".join(texts)
