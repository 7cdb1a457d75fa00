# SPDX-License-Identifier: Apache-2.0
"""Measures what the devices of this machine reach, as a machine to plan for.

    python benchmarks/calibrate.py cluster.toml
    python benchmarks/calibrate.py --cpu-devices=8 laptop.toml

All devices work at the same time, as in a training step: CPU devices share cores, and
GPUs share power and switches. Each rate is of the fastest of several repetitions.
"""

import json
import math
import os
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tessera.analysis.flops import count
from tessera.mesh import Mesh
from tessera.targets.machine import Machine, machine, machine_of_kind
from tessera.train.runtime.devices import prepare_devices

_REPEATS: Final = 5
# Operands that fill an accelerator, and that a CPU multiplies in milliseconds.
_MATMUL_SIZE: Final = {"cpu": 512}
_LARGEST_MATMUL: Final = 8192
_ARRAY_BYTES: Final = {"cpu": 2**24}
_LARGEST_ARRAY: Final = 2**30
_SMALL_BYTES: Final = 1024
_CACHED_BYTES: Final = 2**22
# In all iterations, glibc holds back less than the first and returns the second.
_KEPT_BLOCKS: Final = (2**20, 2**22)
_ITERATIONS: Final = 16

_Body: TypeAlias = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Rates:
    """What one device reaches while all of them work.

    Attributes:
      flops: FLOP/s of matmuls by dtype.
      memory_bandwidth: Bytes/s of an elementwise operation, reads and writes.
      elementwise: Operations per second beside matmuls, such as those of a gelu.
      allocation: Seconds of a byte of temporary memory; 0 where it is there already.
      operation: Seconds of an operation without work.
      step: Seconds of a program without work.
      levels: For each level of links, innermost first: its name, how many devices it
        connects, seconds of a message, bytes/s.
    """

    flops: Mapping[str, float]
    memory_bandwidth: float
    elementwise: float
    allocation: float
    operation: float
    step: float
    levels: Sequence[tuple[str, int, float, float]]


def measure(devices: Sequence[jax.Device] | None = None) -> Rates:
    """Measure the devices of this process, or of all processes of a run.

    Args:
      devices: Which; None takes all of ``jax.devices()``.
    """
    ids = [device.id for device in devices or jax.devices()]
    platform = jax.devices()[0].platform
    mesh = Mesh(("hosts", "devices"), ids, (jax.process_count(), -1))
    size = _MATMUL_SIZE.get(platform, _LARGEST_MATMUL)
    large = _ARRAY_BYTES.get(platform, _LARGEST_ARRAY)
    levels = [
        (axis, mesh.shape[axis], *_measure_links(mesh, axis, large))
        for axis in ("devices", "hosts")
        if mesh.shape[axis] > 1
    ]
    return Rates(
        flops={
            dtype: 2 * size**3 / _seconds(mesh, _matmuls, (size, size), dtype)
            for dtype in ("bfloat16", "float32")
        },
        memory_bandwidth=2 * large / _seconds(mesh, _sweeps, (large // 4,), "float32"),
        elementwise=_elementwise_rate(mesh),
        allocation=_allocation_seconds(mesh) if platform == "cpu" else 0.0,
        operation=_seconds(mesh, _matmuls, (8, 8), "float32"),
        step=_dispatch_seconds(mesh),
        levels=levels,
    )


def calibrated(rates: Rates, name: str) -> Machine:
    """A machine with measured rates, and the other facts of its kind of devices.

    Where the kind is known, its peaks stay, and the measured share of them is the
    efficiency; for others, such as CPUs, what was measured counts as the peak.

    Args:
      rates: From ``measure``.
      name: What to call it.
    """
    device = jax.devices()[0]
    known = machine_of_kind(device.device_kind) or machine("cpu")
    source = f"measured on {date.today()} with JAX {jax.__version__} on "
    source += f"{jax.device_count()} devices: {device.device_kind}"
    links = [
        replace(
            known.links[min(level, len(known.links) - 1)],
            bandwidth=rate,
            efficiency=1.0,
            latency=latency,
            devices=count if level + 1 < len(rates.levels) else None,
        )
        for level, (_, count, latency, rate) in enumerate(rates.levels)
    ]
    changed: dict[str, Any] = {
        "links": tuple(links) or known.links,
        "overhead": {
            "operation": rates.operation,
            "step": rates.step,
            "allocation": rates.allocation,
        },
    }
    shares = {"matmul": 1.0, "memory": 1.0}
    sources = {**known.sources}
    if known.compiler == "cpu":
        changed["flops"] = {**rates.flops, "elementwise": rates.elementwise}
        changed["memory_bandwidth"] = rates.memory_bandwidth
        # The devices share the memory of the host.
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        changed["memory_bytes"] = total // jax.device_count()
        sources["memory_bytes"] = "the memory of the machine, over its devices"
    else:
        flops, nbytes = known.flops["bfloat16"], known.memory_bandwidth
        shares["matmul"] = min(1.0, rates.flops["bfloat16"] / flops)
        shares["memory"] = min(1.0, rates.memory_bandwidth / nbytes)
    figures = ("flops", "memory_bandwidth", "links", "efficiency", "overhead")
    changed["efficiency"] = {**known.efficiency, **shares}
    changed["sources"] = {**sources, **dict.fromkeys(figures, source)}
    return replace(known, name=name, **changed)


def write(found: Machine, path: Path) -> None:
    """Write a machine as a file that ``runtime.target`` reads.

    Raises:
      OSError: The file cannot be written.
    """
    values: dict[str, Any] = {}
    tables: list[tuple[str, Mapping[str, Any]]] = []
    for each in fields(found):
        value = getattr(found, each.name)
        if each.name == "links":
            tables += [("[[links]]", vars(link)) for link in value]
        elif isinstance(value, Mapping):
            tables.append((f"[{each.name}]", value))
        elif each.name not in ("name", "file") and value != each.default:
            values[each.name] = value
    parts = [_table(head, table) for head, table in [("", values), *tables]]
    path.write_text("\n".join(parts), encoding="utf-8")


def _table(head: str, values: Mapping[str, Any]) -> str:
    """One table of a TOML file, whose strings and lists are written as in JSON."""
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in values.items()
        if value is not None
    ]
    return "".join([f"{head}\n" if head else "", *lines])


def _repeated(step: Callable[[jax.Array, jax.Array], jax.Array]) -> _Body:
    """A step on the block of each device, which takes the result of the one before."""

    def body(x: jax.Array) -> jax.Array:
        def again(_: int, carry: jax.Array) -> jax.Array:
            return step(carry, x)

        return lax.fori_loop(0, _ITERATIONS, again, x)

    return body


# Matmuls, whose results neither vanish nor overflow; passes over a block that read and
# write all of it; and elementwise operations on a block that a cache holds.
_matmuls = _repeated(lambda c, x: (c @ x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype))
_sweeps = _repeated(lambda c, _: c * 1.000001 + 1e-6)
_gelus = _repeated(lambda c, _: jax.nn.gelu(c) + 0.5)


def _elementwise_rate(mesh: Mesh) -> float:
    block = (_CACHED_BYTES // 4,)
    program = jax.make_jaxpr(_gelus)(jax.ShapeDtypeStruct(block, jnp.float32))
    return count(program).other / _ITERATIONS / _seconds(mesh, _gelus, block, "float32")


def _kept(x: jax.Array) -> jax.Array:
    """Results that are all kept until a second loop reads them in reverse."""

    def write(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        carry = carry * 1.000001
        return carry, carry

    def read(carry: jax.Array, kept: jax.Array) -> tuple[jax.Array, None]:
        return carry + kept, None

    last, kept = lax.scan(write, x, length=_ITERATIONS)
    return lax.scan(read, last, kept, reverse=True)[0]


def _allocation_seconds(mesh: Mesh) -> float:
    """Seconds of a byte of temporary memory, of more than an allocator holds back."""
    few, many = (_seconds(mesh, _kept, (n // 4,), "float32") for n in _KEPT_BLOCKS)
    return max(many - few, 0.0) / (_KEPT_BLOCKS[1] - _KEPT_BLOCKS[0])


def _measure_links(mesh: Mesh, axis: str, large: int) -> tuple[float, float]:
    """Seconds of a message, and bytes/s that one device sends, along one axis.

    An all-reduce of n devices sends each byte 2 (n - 1) / n times, in 2 log2(n)
    messages one after the other.
    """
    count = mesh.shape[axis]
    body = _repeated(
        lambda c, _: lax.pcast(lax.psum(c, axis) * 0.5, axis, to="varying")
    )
    small = _seconds(mesh, body, (_SMALL_BYTES // 4,), "float32")
    whole = _seconds(mesh, body, (large // 4,), "float32")
    sent = 2 * (large - _SMALL_BYTES) * (count - 1) / count
    return small / (2 * math.ceil(math.log2(count))), sent / max(whole - small, 1e-9)


def _seconds(
    mesh: Mesh,
    body: _Body,
    block: tuple[int, ...],
    dtype: str,
) -> float:
    """Seconds of one iteration of a body whose blocks all devices have at once."""
    axes = mesh.axes
    spec = PartitionSpec(axes)
    shape = (mesh.size * block[0], *block[1:])
    mapped = jax.shard_map(body, mesh=mesh.jax, in_specs=spec, out_specs=spec)
    sharding = jax.sharding.NamedSharding(mesh.jax, spec)
    x = jax.jit(lambda: jnp.ones(shape, dtype) * 0.5, out_shardings=sharding)()
    return _fastest(jax.jit(mapped), x) / _ITERATIONS


def _dispatch_seconds(mesh: Mesh) -> float:
    sharding = jax.sharding.NamedSharding(mesh.jax, PartitionSpec(mesh.axes))
    x = jax.device_put(jnp.ones((mesh.size,)), sharding)
    return _fastest(jax.jit(jnp.negative), x)


def _fastest(function: Callable[[Any], Any], x: Any) -> float:
    """Seconds of the fastest of several calls, the first of which compiles."""
    jax.block_until_ready(function(x))
    spent = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function(x))
        spent.append(time.perf_counter() - start)
    return min(spent)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where to, such as cluster.toml")
    parser.add_argument(
        "--cpu-devices", type=int, metavar="N", help="simulate so many CPU devices"
    )
    options = parser.parse_args()
    if options.file.suffix != ".toml":
        parser.error("the name of the file of a target ends with .toml")
    devices = options.cpu_devices
    prepare_devices(devices or 1, "cpu" if devices else "auto")
    write(calibrated(measure(), options.file.stem), options.file)
    print(options.file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
