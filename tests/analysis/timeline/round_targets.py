# SPDX-License-Identifier: Apache-2.0
"""Targets with round figures, on which times can be computed by hand.

A device does 1e12 FLOP/s in bf16, half as many in f32, 1e9 operations/s beside matmuls,
and moves 1e9 bytes/s to and from its memory; links carry 1e6 bytes/s without latency.
"""

import dataclasses

from tessera.targets.machine import Machine, machine
from tessera.targets.target import Target


def rounded(name: str) -> Machine:
    """A machine with round figures, which starts operations in no time."""
    found = machine(name)
    links = tuple(
        dataclasses.replace(link, bandwidth=1e6, efficiency=1.0, latency=1e-30)
        for link in found.links
    )
    return dataclasses.replace(
        found,
        memory_bandwidth=1e9,
        flops={"bfloat16": 1e12, "float32": 5e11, "elementwise": 1e9},
        links=links,
        efficiency=dict.fromkeys(found.efficiency, 1.0),
        overhead=dict.fromkeys(found.overhead, 0.0),
        clock_hz=1e9 if found.clock_hz else None,
    )


GPU = Target(rounded("h100"), (1, 8), "cuda")
TPU = Target(rounded("v5e"), (4, 4), "tpu")
