# SPDX-License-Identifier: Apache-2.0
"""Predicts how long collectives take on the links of a target.

A group of devices is summarized by how it lies on the links (``Span``): how many of it
share the fast links of a host, or along which dims of a torus it extends. The formulas
are those of "How to Scale Your Model", chapters 3 and 12 (jax-ml.github.io/
scaling-book), with a latency for each step.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.targets.link_routes import domain, permutation_links
from tessera.targets.machine import Link, Machine
from tessera.targets.target import Target


@dataclass(frozen=True)
class Span:
    """How a group of devices lies on the links of its target.

    Attributes:
      size: Devices of the group.
      inside: Devices of it that share a domain of the fastest links.
      rings: On a torus, the rings or lines that it extends along in each slice: how
        many of its devices are on each, and the share of a ring's bandwidth that they
        have.
    """

    size: int
    inside: int
    rings: tuple[tuple[int, float], ...] = ()

    @property
    def domains(self) -> int:
        """Domains of the fastest links that the group extends over."""
        return -(-self.size // self.inside)


def span(target: Target, group: Sequence[int]) -> Span:
    """How devices lie on the links.

    Args:
      target: The machine.
      group: Ids of devices of the target.
    """
    domains: dict[int, list[int]] = {}
    for device in group:
        domains.setdefault(domain(target, device), []).append(device)
    largest = max(domains.values(), key=len)
    rings = _rings(target, largest) if target.machine.is_torus else ()
    return Span(len(group), len(largest), rings)


def permutation_span(target: Target, pairs: Iterable[tuple[int, int]]) -> Span:
    """How the pair of a permutation that takes longest lies on the links.

    On a torus, pairs whose routes share a link share its bandwidth.

    Args:
      target: The machine.
      pairs: Sender and receiver, as ids of devices of the target.
    """
    if not (loads := permutation_links(target, pairs)):
        return Span(1, 1)
    links = target.machine.links
    if len(links) > 1 and links[-1].name in loads:
        return Span(2, 1)
    share = 1.0 / max(loads.values())
    return Span(2, 2, ((2, share),) if target.machine.is_torus else ())


def _rings(target: Target, group: Sequence[int]) -> tuple[tuple[int, float], ...]:
    machine = target.machine
    places = [target.coordinates[device] for device in group]
    rings = []
    for dim, length in enumerate(target.shape):
        used = sorted({place[dim] for place in places})
        if len(used) == 1:
            continue
        # Members that are not neighbors share the links with those between them.
        stride = max(1, (used[-1] - used[0]) // (len(used) - 1))
        is_ring = len(used) * stride == length and length % machine.ring_multiple == 0
        rings.append((len(used), (1.0 if is_ring else 0.5) / stride))
    return tuple(rings)


def collective_seconds(
    machine: Machine, kind: str, nbytes: float, where: Span
) -> float:
    """Predicted seconds of one call of a collective.

    V is the size of the array that a group has together, n its devices, of which g
    share the fastest links, in h domains; W and w are the rates of the links inside
    and outside. On a switch the slower of the two levels decides, as they work at the
    same time and every device has links outside of its own:

        all-gather, reduce-scatter   max(V / W · (n − 1) / n, V / (g w) · (h − 1) / h)
        all-reduce                   twice that
        all-to-all                   max(v / W · (g − 1) / n, v / w · (n − g) / n)
        permute, broadcast           v / W, or v / w between domains

    On a torus W is the sum over the rings that the group extends along; an all-to-all
    takes V / 4 W and a permute has one direction of one ring. Between slices libtpu
    reduces or gathers inside of each and across one after the other, so both add up.

    Args:
      machine: Whose links.
      kind: XLA's name, such as ``all-reduce``.
      nbytes: V for all-gather, reduce-scatter and all-reduce; v, the array on one
        device, for the others.
      where: How the group lies on the links.
    """
    if where.size == 1:
        return 0.0
    levels = level_bytes(machine, kind, nbytes, where)
    if not machine.is_torus:
        longest = max(sent / link.rate for link, sent in levels.items())
        return longest + _latency(machine, kind, where)
    fast, slow, seconds = machine.links[0], machine.links[-1], 0.0
    if levels[fast]:
        nbytes *= where.inside / where.size if "to-all" in kind else 1
        inside = Span(where.inside, where.inside, where.rings)
        seconds = _torus_seconds(fast, kind, nbytes, inside)
    if where.domains > 1:
        latency = _latency(machine, kind, Span(where.domains, 1))
        seconds += levels[slow] / slow.rate + latency
    return seconds


def level_bytes(
    machine: Machine, kind: str, nbytes: float, where: Span
) -> dict[Link, float]:
    """Bytes that one device sends over each level of links, in one call.

    Args:
      machine: Whose links.
      kind: XLA's name, such as ``all-reduce``.
      nbytes: As for ``collective_seconds``.
      where: How the group lies on the links; of two devices at least.
    """
    fast, slow = machine.links[0], machine.links[-1]
    n, g, h = where.size, where.inside, where.domains
    if len(machine.links) == 1:
        return {fast: sent_bytes(kind, nbytes, n)}
    match kind:
        case "all-to-all" | "ragged-all-to-all":
            inner, outer = nbytes * (g - 1) / n, nbytes * (n - g) / n
        case "collective-permute" | "collective-broadcast":
            inner, outer = (nbytes, 0.0) if h == 1 else (0.0, nbytes)
        case _:
            ring = g if machine.is_torus else n
            inner = sent_bytes(kind, nbytes, ring) if g > 1 else 0.0
            outer = sent_bytes(kind, nbytes, h) / g
    return {fast: inner, slow: outer}


def _latency(machine: Machine, kind: str, where: Span) -> float:
    fast, slow = machine.links[0], machine.links[-1]
    if kind in ("collective-permute", "collective-broadcast"):
        return slow.latency if where.domains > 1 else fast.latency
    latency = fast.latency * math.ceil(math.log2(where.inside)) + (
        slow.latency * math.ceil(math.log2(where.domains)) if where.domains > 1 else 0.0
    )
    return latency * (2 if kind == "all-reduce" else 1)


def sent_bytes(kind: str, nbytes: float, size: int) -> float:
    """Bytes that one device sends in one call, by the algorithm that sends least.

    Divided by the time of a call they are what NCCL's tests call bus bandwidth.

    Args:
      kind: XLA's name, such as ``all-reduce``.
      nbytes: As for ``collective_seconds``.
      size: Devices of a group.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return nbytes
    times = 2 if kind == "all-reduce" else 1
    return times * nbytes * (size - 1) / size


def _torus_seconds(link: Link, kind: str, nbytes: float, where: Span) -> float:
    n = where.size
    rings = where.rings or ((n, 1.0),)  # the devices of one chip
    rate = link.rate * sum(share for _, share in rings)
    hops = sum(length // 2 for length, _ in rings)
    match kind:
        case "all-to-all" | "ragged-all-to-all":
            return nbytes * n / (4 * rate) + hops * link.latency
        case "collective-permute" | "collective-broadcast":
            return 2 * nbytes / (link.rate * min(s for _, s in rings)) + link.latency
        case _:
            times = 2 if kind == "all-reduce" else 1
            return sent_bytes(kind, nbytes, n) / rate + times * hops * link.latency
