# SPDX-License-Identifier: Apache-2.0
"""``Machine``: the devices and links of a kind of machine, from ``configs/target``.

Every figure in such a file has a source in the same file. Users add machines by
writing a file of their own.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from tessera.errors import TargetError, did_you_mean
from tessera.foundations.config_files import configs_dir

PLATFORMS: Final[Mapping[str, str]] = MappingProxyType(
    {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
)
"""Compilers of targets, and JAX's name of the platform that each compiles for."""

HOST_BANDWIDTH: Final = 2.4e10
"""Bytes/s between a device and its host: PCIe 4.0 of 16 lanes, at three quarters."""

_EFFICIENCIES: Final = ("matmul", "attention", "memory", "overlap")
_FP8: Final = "float8"  # of machines that have it
_LONGEST: Final = 2**20
# Names and switches, which have no source.
_NO_FIGURES: Final = "compiler", "device_kinds", "topology", "chip_config", "sources"


@dataclass(frozen=True)
class Link:
    """One level of the links between devices.

    Attributes:
      name: Such as ``NVLink``.
      bandwidth: Bytes/s that one device sends at most, in one direction; on a torus
        along one ring, both ways together.
      efficiency: The share of it that large collectives reach.
      latency: Seconds of one message.
      devices: Devices that the level connects; None connects all, and the first level
        of a torus those of a slice.
    """

    name: str
    bandwidth: float
    efficiency: float
    latency: float
    devices: int | None = None

    @property
    def rate(self) -> float:
        """Bytes/s that one device sends in a large collective."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of machine: one device and the links to others.

    Attributes:
      name: The name of its file.
      compiler: ``cpu``, ``cuda`` or ``tpu``.
      device_kinds: JAX's names of the device, ``jax.devices()[0].device_kind``.
      memory_bytes: Memory of one device.
      memory_bandwidth: Bytes/s between a device and its memory.
      flops: Peak FLOP/s of dense matmuls, by dtype: ``bfloat16``, ``float32``, and
        ``float8`` where the devices have such; and of other operations,
        ``elementwise``.
      links: The levels of links, fastest first.
      efficiency: Shares of the peaks that good kernels reach on large operands:
        ``matmul``, ``attention`` and ``memory``; and ``overlap``, the share of the time
        of computation in which collectives run that nothing waits for.
      overhead: Seconds that each ``operation`` and each ``step`` takes beside its work,
        and each byte of temporary memory: its ``allocation``.
      devices_per_host: Devices of one host.
      compiler_config: For ``cuda``: XLA's ``GpuTargetConfigProto`` in text form.
      topology: For ``tpu``: how libtpu calls it, such as ``v5e``.
      chip_config: For ``tpu``: which of libtpu's chip configurations.
      devices_per_chip: For ``tpu``: devices that share a place in the torus.
      largest_torus: For ``tpu``: chips along each dim of the largest slice.
      ring_multiple: For ``tpu``: a dim of a multiple of so many chips is a ring.
      clock_hz: For ``tpu``: cycles per second, in which the compiler counts times.
      sources: Where each figure is from, by its name.
    """

    name: str
    compiler: str
    device_kinds: tuple[str, ...]
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    links: tuple[Link, ...]
    efficiency: Mapping[str, float] = field(hash=False)
    overhead: Mapping[str, float] = field(hash=False)
    devices_per_host: int
    sources: Mapping[str, str] = field(hash=False)
    compiler_config: str = ""
    topology: str = ""
    chip_config: str = "default"
    devices_per_chip: int = 1
    largest_torus: tuple[int, ...] = ()
    ring_multiple: int = 1
    clock_hz: float | None = None
    file: Path | None = field(default=None, compare=False)

    @property
    def platform(self) -> str:
        """JAX's name of the platform: ``cpu``, ``gpu`` or ``tpu``."""
        return PLATFORMS[self.compiler]

    @property
    def device_kind(self) -> str:
        """JAX's name of the device."""
        return self.device_kinds[0]

    @property
    def is_torus(self) -> bool:
        """Whether devices have links to their neighbors alone, as in a TPU slice."""
        return bool(self.largest_torus)

    @property
    def has_fp8(self) -> bool:
        """Whether devices multiply 8-bit floating-point numbers; CPUs simulate it."""
        return self.compiler == "cpu" or _FP8 in self.flops

    def peak(self, dtype: str) -> float | None:
        """Peak FLOP/s of matmuls by a key of ``flops``; float16 is as bfloat16.

        None where it is unknown.
        """
        return self.flops.get("bfloat16" if dtype == "float16" else dtype)

    def product_rate(self, dtype: str, kind: str = "matmul") -> float:
        """FLOP/s of large matmuls or of ``attention``; unknown dtypes as bfloat16."""
        peak = self.peak(dtype) or self.flops["bfloat16"]
        return peak * self.efficiency["attention" if kind == "attention" else "matmul"]

    @property
    def memory_rate(self) -> float:
        """Bytes/s between a device and its memory in large operations."""
        return self.memory_bandwidth * self.efficiency["memory"]

    def seconds(
        self, products: float = 0.0, elementwise: float = 0.0, nbytes: float = 0.0
    ) -> float:
        """Seconds of an operation, without the time that it takes to start it.

        What takes longest decides: the roofline of Williams, Waterman and Patterson,
        doi.org/10.1145/1498765.1498785.

        Args:
          products: Seconds of its matmuls, by ``product_rate``.
          elementwise: Its other operations, one for each element.
          nbytes: What it reads and writes.
        """
        others = elementwise / self.flops["elementwise"]
        return max(products, others, nbytes / self.memory_rate)


def machine_names() -> list[str]:
    """The machines that have a file."""
    return sorted(file.stem for file in (configs_dir() / "target").glob("*.toml"))


@cache
def machine(name: str) -> Machine:
    """A machine by its name, or by the path of a file.

    Args:
      name: Of a file in ``configs/target`` without its ending, or a path that ends with
        ``.toml``.

    Raises:
      TargetError: [T711] there is no such machine, or its file is wrong.

    Example:
      >>> machine("h100").links[0].name
      'NVLink'
    """
    if name.endswith(".toml"):
        path = Path(name).expanduser()
    elif name in (known := machine_names()):
        path = configs_dir() / "target" / f"{name}.toml"
    else:
        raise TargetError(
            f"there is no target {name!r}",
            fix=f"{did_you_mean(name, known)}; or name a file of yours that ends with "
            ".toml",
        )
    return _read(path)


def machine_of_kind(device_kind: str) -> Machine | None:
    """The machine whose devices JAX calls so; None where there is no file for it."""
    for name in machine_names():
        found = machine(name)
        if found.compiler != "cpu" and device_kind in found.device_kinds:
            return found
    return None


def _read(path: Path) -> Machine:
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text):,} characters, of {_LONGEST:,}")
        values: dict[str, Any] = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(path, f"{type(error).__name__}: {error}") from error
    if problems := list(_problems(values)):
        raise _wrong(path, "\n".join(problems))
    links = tuple(Link(**link) for link in values.pop("links"))
    figures: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
    }
    return Machine(name=path.stem, links=links, file=path, **figures)


def _wrong(path: Path, got: str) -> TargetError:
    return TargetError(
        f"the target file {path} is not a machine",
        got=got,
        fix="begin with a copy of a file in configs/target; docs/reference/targets.md "
        "explains every key",
    )


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Everything that is wrong with the contents of a file, one line each."""
    known = {each.name: each for each in fields(Machine)}
    del known["name"], known["file"]
    for key in sorted(values.keys() - known.keys()):
        yield f"unknown key {key!r}: {did_you_mean(str(key), sorted(known))}"
    for key in sorted(known.keys() - values.keys()):
        if known[key].default is MISSING:
            yield f"the key {key!r} is missing"
    if values.get("compiler") not in PLATFORMS:
        yield f"compiler is one of {', '.join(PLATFORMS)}"
    yield from _figure_problems(values)
    for key, value in values.items():
        has_source = key in (values.get("sources") or {})
        if key in known and key not in _NO_FIGURES and not has_source:
            yield f"sources.{key} is missing: say where {value!r:.60} is from"


def _figure_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Figures that are no numbers above 0, and names that are missing beside them."""
    for key in ("memory_bytes", "memory_bandwidth", "devices_per_host", "clock_hz"):
        if key in values and not _is_positive(values[key]):
            yield f"{key} is a number above 0"
    for key, names in {
        "flops": ("bfloat16", "float32", "elementwise"),
        "efficiency": _EFFICIENCIES,
        "overhead": ("operation", "step", "allocation"),
    }.items():
        numbers = values.get(key, {})
        optional = {_FP8} if key == "flops" else set()
        if not isinstance(numbers, dict) or {*numbers} - optional != {*names}:
            yield f"{key} has the keys {', '.join(names)}"
        elif not all(_is_rate(key, number) for number in numbers.values()):
            yield f"{key} has numbers above 0" + (", or 0" if key == "overhead" else "")
        elif key == "efficiency" and max(numbers.values()) > 1:
            yield f"{key} has shares of 1"
    links = values.get("links", ())
    if not isinstance(links, list) or not links:
        yield "links is a list of levels, fastest first"
        return
    names = {each.name for each in fields(Link)}
    is_torus = "largest_torus" in values  # whose slice is what the first level joins
    for number, link in enumerate(links):
        needed = names - {"devices"}
        if not isinstance(link, dict) or not needed <= set(link) <= names:
            yield f"links[{number}] has the keys {', '.join(sorted(needed))}"
        elif not all(_is_positive(v) for k, v in link.items() if k != "name"):
            yield f"links[{number}] has numbers above 0"
        elif "devices" not in link and links[number + 1 :] and not is_torus:
            yield f"links[{number}].devices is missing: only the last level has none"


def _is_positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and cast(float, value) > 0


def _is_rate(key: str, value: object) -> bool:
    return _is_positive(value) or (key == "overhead" and value == 0)
