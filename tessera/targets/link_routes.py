# SPDX-License-Identifier: Apache-2.0
"""Finds the links of a target that a collective uses.

Collectives that share a link wait for each other; others run at the same time, such as
two permutations around a ring in opposite directions.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TypeAlias

from tessera.targets.target import Target

# A level of links by its name, or one link of a torus in one direction: its dim, the
# direction along it, and the chip that it leaves, last its slice.
UsedLink: TypeAlias = str | tuple[int, int, tuple[int, ...]]

# Of devices that share a chip of a torus.
_CHIP: tuple[UsedLink, ...] = ("chip",)


def group_links(target: Target, group: Sequence[int]) -> frozenset[UsedLink]:
    """The links that a collective uses, of this group and of groups beside it.

    Args:
      target: The machine.
      group: Ids of the devices of one group.

    Example:
      >>> sorted(group_links(Target.parse("h100:2x8"), [0, 1, 8, 9]))
      ['InfiniBand', 'NVLink']
    """
    if len(group) < 2:
        return frozenset()
    domains = Counter(domain(target, device) for device in group)
    fast, slow = target.machine.links[0].name, target.machine.links[-1].name
    outside = frozenset({slow} if len(domains) > 1 else ())
    if not target.machine.is_torus:
        return outside | ({fast} if max(domains.values()) > 1 else set())
    *places, _ = zip(*(target.coordinates[device] for device in group), strict=True)
    dims = tuple(dim for dim, used in enumerate(places) if len(set(used)) > 1)
    return outside if outside and not dims else outside | _links_along(target, dims)


def permutation_links(
    target: Target, pairs: Iterable[tuple[int, int]]
) -> Counter[UsedLink]:
    """The links that a permutation uses, and how many of its pairs share each.

    On a torus each pair takes the shortest way, one dim after the other.

    Args:
      target: The machine.
      pairs: Sender and receiver, as ids of devices of the target.

    Example:
      >>> permutation_links(Target.parse("v5e:4x4"), [(0, 1), (1, 2)])
      Counter({(0, 1, (0, 0, 0)): 1, (0, 1, (1, 0, 0)): 1})
    """
    loads: Counter[UsedLink] = Counter()
    for sender, receiver in pairs:
        if sender == receiver:
            continue
        is_inside = domain(target, sender) == domain(target, receiver)
        if is_inside and target.machine.is_torus:
            loads.update(list(_route(target, sender, receiver)) or _CHIP)
        else:
            loads[target.machine.links[0 if is_inside else -1].name] += 1
    return loads


def domain(target: Target, device: int) -> int:
    """The number of the domain of the fastest links that a device is in.

    Example:
      >>> [domain(Target.parse("h100:2x4"), device) for device in (3, 4)]
      [0, 1]
    """
    machine = target.machine
    size = machine.links[0].devices
    if size is None or target.slices > 1:
        return device // target.slice_size
    if len(target.shape) == 2:
        # A target may use a part of the devices of each host.
        hosts = -(-size // machine.devices_per_host)
        size = min(size, hosts * target.shape[1])
    return device // size


@cache
def _links_along(target: Target, dims: tuple[int, ...]) -> frozenset[UsedLink]:
    places = itertools.product(*map(range, (*target.shape, target.slices)))
    found = [(dim, step, at) for at in places for dim in dims for step in (1, -1)]
    return frozenset(found or _CHIP)


def _route(target: Target, sender: int, receiver: int) -> Iterator[UsedLink]:
    place, end = list(target.coordinates[sender]), target.coordinates[receiver]
    for dim, length in enumerate(target.shape):
        hops = end[dim] - place[dim]
        is_ring = length % target.machine.ring_multiple == 0
        if is_ring and 2 * abs(hops) > length:
            hops -= int(math.copysign(length, hops))
        step = 1 if hops > 0 else -1
        for _ in range(abs(hops)):
            yield dim, step, tuple(place)
            place[dim] = (place[dim] + step) % length
