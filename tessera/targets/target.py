# SPDX-License-Identifier: Apache-2.0
"""``Target``: a machine of some size, such as ``h100:2x8``, that need not be there."""

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Final

import jax

from tessera.errors import TargetCompilerError, TargetError
from tessera.jax_compat import target_devices
from tessera.targets.machine import PLATFORMS as PLATFORMS
from tessera.targets.machine import Machine, machine, machine_names

# 2x8, 4x4x4*2
_SIZES: Final = re.compile(r"(\d+(?:x\d+)*)(?:\*(\d+))?")
# 8xh100, h100x8, v5e-8
_OTHER_FORM: Final = re.compile(r"(?:(\d+)[x*×])?(\w+?)(?:[x*×-](\d+))?")
# The packages that each compiler needs: all those of one extra.
_PACKAGES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "cpu": {"": ()},
    "cuda": {
        "targets-cuda13": ("jax_plugins.xla_cuda13", "nvidia.cu13"),
        "targets-cuda12": ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"),
    },
    "tpu": {"targets-tpu": ("libtpu",)},
}


@dataclass(frozen=True)
class Target:
    """A machine of some size.

    Attributes:
      machine: Its devices and links.
      shape: Hosts and devices of each; of a torus the chips along each dim; of ``cpu``
        the devices. All of one slice, where there are several.
      compiler: What compiles for it: that of the machine, or ``cpu`` to stand in.
      slices: TPU slices, or racks of GPUs, that slower links join.

    Example:
      >>> target = Target.parse("h100:2x8")
      >>> target.num_devices, target.machine.platform
      (16, 'gpu')
    """

    machine: Machine
    shape: tuple[int, ...]
    compiler: str
    slices: int = 1

    @classmethod
    def parse(cls, text: str, compiler: str | None = None) -> "Target":
        """The target of a text such as ``h100:2x8``, ``v5p:4x4x4*2`` or ``cpu:8``.

        Args:
          text: The machine's name or file, a colon, and its size: hosts × devices of
            each, or the chips of a torus along each dim. The hosts may be left out.
            ``*2`` after it is two such slices or racks.
          compiler: ``cpu`` compiles for CPU devices instead; None is the machine's own.

        Raises:
          TargetError: [T711] there is no such machine, or none of that size.
        """
        name, colon, size = str(text).strip().rpartition(":")
        if not colon and (form := _OTHER_FORM.fullmatch(size)):
            before, size, behind = form.groups()
            if (before or behind) and size in machine_names():
                found, count = machine(size), int(before or behind)
                _, near = _size_problem(found, (count,)) or ("", (count,))
                raise _size_error(found, text, "the size stands after a colon", near)
        found = machine(name if colon else size)
        if compiler not in (None, "cpu", found.compiler):
            raise TargetError(
                f"{found.name} has no compiler {compiler!r}",
                got=f"compiler={compiler!r}",
                fix=f"use 'cpu' or {found.compiler!r}",
            )
        if not colon or not (form := _SIZES.fullmatch(size)):
            raise _size_error(found, text, "there is no size", _usual(found))
        sizes, slices = tuple(map(int, form[1].split("x"))), int(form[2] or 1)
        if problem := _size_problem(found, sizes, slices):
            raise _size_error(found, text, *problem)
        if found.compiler == "cuda" and len(sizes) == 1:
            sizes = (1, *sizes)
        return cls(found, sizes, compiler or found.compiler, slices)

    @property
    def name(self) -> str:
        """The text that ``parse`` reads."""
        slices = f"*{self.slices}" if self.slices > 1 else ""
        return f"{self.machine.name}:{'x'.join(map(str, self.shape))}{slices}"

    @property
    def num_devices(self) -> int:
        """JAX devices."""
        return self.slices * self.slice_size

    @property
    def slice_size(self) -> int:
        """JAX devices of one slice, which have numbers that follow each other."""
        return math.prod(self.shape) * self.machine.devices_per_chip

    @property
    def platform(self) -> str:
        """JAX's name of the platform that programs are compiled for."""
        return PLATFORMS[self.compiler]

    @property
    def is_stand_in(self) -> bool:
        """Whether another compiler stands in for that of the machine."""
        return self.compiler != self.machine.compiler

    @property
    def is_installed(self) -> bool:
        """Whether the packages of the compiler are there."""
        return not self._missing_packages()

    @cached_property
    def devices(self) -> Sequence[jax.Device]:
        """Devices to compile for and never to run on, in the order of their ids.

        Raises:
          TargetCompilerError: [T712] the compiler is not installed, or does not start.
          TargetError: [T711] the compiler knows no slice of that shape.
        """
        if missing := self._missing_packages():
            raise TargetCompilerError(
                f"the compiler of target {self.name} is not installed",
                got=f"no package {', '.join(missing)}",
                fix=f"{self.installation}\n"
                "or compile for CPU devices instead, whose memory and collectives are "
                "not those of the target: runtime.target_compiler=cpu",
            )
        try:
            return self._topology()
        except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            # libtpu says so of shapes that no slice has.
            if "INVALID_ARGUMENT" in lines[0] and self.compiler == "tpu":
                raise _size_error(self.machine, self.name, lines[0]) from error
            raise TargetCompilerError(
                f"the compiler of target {self.name} does not start",
                got=lines[0],
                fix=f"{self.installation}, with packages of the version of JAX, "
                f"which is {jax.__version__}",
            ) from error

    @property
    def installation(self) -> str:
        """The command that installs the compiler."""
        extras = [f"'tessera-spmd[{extra}]'" for extra in _PACKAGES[self.compiler]]
        return f"pip install --upgrade {' or '.join(extras)}"

    def _missing_packages(self) -> list[str]:
        """What the extra that lacks least lacks."""

        def is_missing(package: str) -> bool:
            try:
                return find_spec(package) is None
            except ModuleNotFoundError:
                return True

        extras = _PACKAGES[self.compiler].values()
        return min((list(filter(is_missing, each)) for each in extras), key=len)

    def _topology(self) -> Sequence[jax.Device]:
        found = self.machine
        if self.compiler == "cpu":
            return target_devices.cpu_devices(self.num_devices)
        if self.compiler == "tpu":
            size = "x".join(map(str, self.shape))
            topology = f"{found.topology}:{size}"
            return target_devices.tpu_devices(topology, found.chip_config, self.slices)
        size = f"{self.slices}x{'x'.join(map(str, self.shape))}"
        return target_devices.cuda_devices(size, found.compiler_config)

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Where each device is, in the order of their ids.

        Of a torus the chip along each dim, then the slice; else the host, then the
        device in it.
        """
        if not self.machine.is_torus:
            *hosts, devices = self.shape
            sizes = self.slices * math.prod(hosts), devices
            return tuple(itertools.product(*map(range, sizes)))
        # The first dim varies fastest; the devices of a chip are next to each other.
        chips = itertools.product(*map(range, (self.slices, *reversed(self.shape))))
        copies = range(self.machine.devices_per_chip)
        return tuple(tuple(reversed(chip)) for chip in chips for _ in copies)

    def __str__(self) -> str:
        return self.name


def _size_problem(
    found: Machine, sizes: tuple[int, ...], slices: int = 1
) -> tuple[str, tuple[int, ...]] | None:
    """What is wrong with the sizes of a target, and near sizes that it may have."""
    largest, most = found.largest_torus, found.devices_per_host
    fast, size = found.links[0], math.prod(sizes)
    if 0 in (*sizes, slices):
        return "a size is 0", _usual(found)
    if slices > 1 and len(found.links) == 1:
        return f"{found.name} has no links between slices, only {fast.name}", sizes
    if found.is_torus:
        if len(sizes) != len(largest):
            got = f"{len(sizes)} sizes, and the torus has {len(largest)} dims"
            return got, _usual(found)
        if any(map(operator.gt, sorted(sizes), sorted(largest))):
            return f"the largest slice is {'x'.join(map(str, largest))}", largest
        even = tuple(size + size % 2 for size in sizes[:2])
        if even != sizes[:2]:
            got = "hosts have 2 × 2 chips, so the first two sizes are even"
            return got, (*even, *sizes[2:])
    elif found.compiler == "cpu":
        if len(sizes) > 1 or sizes[0] > most:
            return "CPU devices are of one host", (most,)
    elif len(sizes) > 2:
        got = f"{len(sizes)} sizes; a target of hosts has hosts × devices of each"
        return got, _usual(found)
    elif sizes[-1] > most:
        got = f"{sizes[-1]} devices in a host, and it has {most}"
        return got, (max(1, round(size / most)), most)
    elif slices > 1 and size > (fast.devices or size):
        got = f"{size} devices in each, and {fast.name} joins {fast.devices} of them"
        return got, (slices * size // sizes[-1], sizes[-1])
    return None


def _usual(found: Machine) -> tuple[int, ...]:
    """Sizes that every target of a machine may have."""
    if found.is_torus:
        return (4,) * len(found.largest_torus)
    return (8,) if found.compiler == "cpu" else (2, found.devices_per_host)


def _size_error(
    found: Machine, text: str, got: str, near: tuple[int, ...] = ()
) -> TargetError:
    kind = "chips along each dim" if found.is_torus else "hosts × devices of each"
    example = f", such as {found.name}:{'x'.join(map(str, near))}" if near else ""
    if near and found.is_torus:
        example += f", or {example[10:]}*2 for two slices"
    return TargetError(
        f"there is no target {text!r}",
        got=got,
        fix=f"write {found.name}:<{kind}>{example}",
    )
