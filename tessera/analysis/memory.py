# SPDX-License-Identifier: Apache-2.0
"""Reports how much memory a compiled program needs on each device.

    memory(step.compile()).as_text()

XLA plans the buffers at compile time, so the figures are known before anything is
allocated, and for meshes that this machine does not have.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device while a compiled program runs.

    Attributes:
      arguments: The inputs' shards.
      outputs: The results' shards, donated ones among them.
      temporaries: Buffers that the program allocates and frees again.
      aliased: Outputs in the buffers of donated inputs; counted in both.
      code: The compiled program, where the platform keeps it in device memory.
      compiled_for: The kind of device, as JAX calls it, if it is known.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int
    compiled_for: str = ""

    @property
    def peak(self) -> int:
        """An upper bound of bytes in use: all of the above, donated buffers once."""
        used = self.arguments + self.outputs + self.temporaries + self.code
        return used - self.aliased

    def as_text(self) -> str:
        """One line per part, largest unit that fits.

        Example:
          >>> print(Memory(3 << 20, 1 << 20, 5 << 19, 1 << 20, 0).as_text())
          memory per device
            arguments   3.00 MiB
            outputs     1.00 MiB
            temporaries 2.50 MiB
            aliased     1.00 MiB
            code        0 B
            peak        5.50 MiB
        """
        parts = {**asdict(self), "peak": self.peak}
        kind = parts.pop("compiled_for")
        title = "memory per device" + (f", compiled for {kind}" if kind else "")
        lines = [f"  {name:<11} {format_bytes(size)}" for name, size in parts.items()]
        return "\n".join([title, *lines])


def memory(compiled: jax.stages.Compiled, compiled_for: str = "") -> Memory:
    """The memory that a compiled program needs on each device.

    Args:
      compiled: From ``jax.jit(f).lower(...).compile()``. The figures are those of the
        platform it was compiled for: a CPU program's temporaries are not a GPU's.
      compiled_for: The kind of device that it was compiled for.

    Returns:
      Bytes per device.
    """
    stats: Any = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        compiled_for=compiled_for,
    )


def format_bytes(count: float) -> str:
    """A number of bytes with a binary unit, to about three digits.

    Example:
      >>> format_bytes(512), format_bytes(4096), format_bytes(141 << 30)
      ('512 B', '4.00 KiB', '141 GiB')
    """
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    if not unit:
        return f"{count:.0f} B"
    return f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {_UNITS[unit]}"
