# SPDX-License-Identifier: Apache-2.0
"""Reads the program of one TPU slice as that of all slices of a mesh.

For a mesh of several slices libtpu compiles a program that each slice runs, with the
devices of one slice: number p is the p-th of them in the order of the mesh. What
crosses slices it leaves to the runtime, as a send to the host and a recv from it. Here
they become what XLA writes for the same collective of one slice, and all groups of
devices are positions in the mesh. For two slices of four devices:

    send, recv             all-reduce-start
    recv-done              all-reduce-done
    {{0,1},{2,3}}          {{0,1},{2,3},{4,5},{6,7}}
    "{1,2}x{0:3}"          {{0,4},{1,5},{2,6},{3,7}}
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tessera.analysis import hlo
from tessera.analysis.collective_operands import groups_of
from tessera.analysis.hlo import Computation, Instruction, Module
from tessera.errors import MeshShapeError
from tessera.mesh import Mesh

# In the attributes of what crosses slices.
RUNTIME: Final = "xla_megascale_runtime"

_KEY: Final = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TYPE: Final = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET: Final = re.compile(r'_xla_megascale_target="?([\d{},:x>-]+)')
_KINDS: Final = {"ONE_TO_ONE": "collective-permute"}
_GROUPS: Final = ("source_target_pairs", "replica_groups")
# libtpu numbers the devices of the first slice from 100000, of the second from 200000.
_FIRST: Final = 100_000


def program_of(text: str, mesh: Mesh | None) -> Module:
    """The compiled module that a text shows, for all devices of a mesh.

    Args:
      text: What ``compiled.as_text()`` returns.
      mesh: The mesh that it was compiled for.

    Raises:
      MeshShapeError: [T101] the program is for another number of devices.
    """
    module = hlo.parse(text)
    # A program of one device may be alone, or in slices of one device each.
    is_alone = module.num_devices == 1 and RUNTIME not in text
    if mesh is None or is_alone or module.num_devices == mesh.size:
        return module
    slices: dict[int, list[int]] = {}
    for position, number in enumerate(mesh.slices):
        slices.setdefault(number, []).append(position)
    if {module.num_devices} != {*map(len, slices.values())}:
        raise MeshShapeError(
            "the mesh is not the one that the program was compiled for",
            got=f"{mesh.topology} = {mesh.size} devices, "
            f"a program for {module.num_devices}",
            fix="pass the mesh that the program was lowered on",
        )
    if mesh.target is not None:
        numbers = [divmod(n, mesh.target.slice_size) for n in mesh.device_ids]
    else:
        numbers = [divmod(d.id - _FIRST, _FIRST) for d in mesh.jax.devices.flat]
    positions = {number: position for position, number in enumerate(numbers)}
    members = slices.values()
    whole = {
        name: Computation(name, {i.name: i for i in _joined(one, members, positions)})
        for name, one in module.computations.items()
    }
    return replace(module, computations=whole, num_devices=mesh.size)


def _joined(
    computation: Computation,
    slices: Collection[Sequence[int]],
    positions: Mapping[tuple[int, int], int],
) -> Iterator[Instruction]:
    """The instructions of a computation, with the collectives of all slices.

    Args:
      computation: That of one slice.
      slices: The positions of the devices of each slice in the mesh, in order.
      positions: That of a device by its slice and its number in it.
    """
    every, size = computation.instructions, len(next(iter(slices)))
    across = [each for each in every.values() if RUNTIME in each.tail]
    sends = {_found(_KEY, each): each for each in across if each.opcode == "send"}
    recvs = {_found(_KEY, each): each for each in across if each.opcode == "recv"}
    starts = {recv.name: sends[key] for key, recv in recvs.items() if key in sends}
    for each in every.values():
        if name := next(filter(each.attributes.__contains__, _GROUPS), None):
            try:
                groups = groups_of(each, size)
            except ValueError:  # a newer XLA writes them in another syntax
                yield each
                continue
            inside = [[own[p] for p in one] for own in slices for one in groups]
            yield _with_groups(each, name, inside)
        elif 'custom_call_target="SliceId"' in each.tail:
            yield replace(each, opcode="partition-id")
        elif RUNTIME not in each.tail:
            yield each
        elif each.opcode == "send":
            received = recvs.get(_found(_KEY, each), each)
            start = replace(
                each,
                opcode=f"{_kind(each)}-start",
                operands=each.operands[:1],
                result=f"({each.shapes[0]}, {received.shapes[0]})",
            )
            # A device that the mesh does not have makes it one of unknown groups.
            none = len(positions)
            outside = [[positions.get(i, none) for i in one] for one in _groups(each)]
            name = _GROUPS["permute" not in start.opcode]
            yield _with_groups(start, name, outside or [[none, none]])
        elif each.opcode == "recv-done" and each.operands[0] in starts:
            start = starts[each.operands[0]]
            yield replace(each, opcode=f"{_kind(start)}-done", operands=(start.name,))
        elif each.opcode != "send-done":
            yield each


def _groups(send: Instruction) -> list[list[tuple[int, int]]]:
    """The devices of a collective across slices, by slice and number in it."""
    text = _found(_TARGET, send)
    if "x" in text:
        numbers, devices = map(_numbers, text.split("x"))
        return [[(number - 1, each) for number in numbers] for each in devices]
    ids = map(_numbers, re.findall(r"\{([^{}]+)\}", text))
    return [[divmod(each - _FIRST, _FIRST) for each in group] for group in ids]


def _numbers(text: str) -> list[int]:
    """The numbers of a list such as ``{0:3,8}``."""
    found = re.findall(r"(\d+)(?::(\d+))?", text)
    return [n for low, high in found for n in range(int(low), int(high or low) + 1)]


def _with_groups(each: Instruction, name: str, groups: list[list[int]]) -> Instruction:
    text = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
    # Of two attributes of a name the last one counts.
    return replace(each, tail=f"{each.tail}, {name}={{{text}}}")


def _kind(send: Instruction) -> str:
    return _KINDS.get(name := _found(_TYPE, send), name.lower().replace("_", "-"))


def _found(pattern: re.Pattern[str], instruction: Instruction) -> str:
    match = pattern.search(instruction.tail)
    return match[1] if match else ""
