# SPDX-License-Identifier: Apache-2.0
"""Predicts how long single operations take on a device.

The compiler of TPUs writes its own estimate beside each operation, in cycles. Anywhere
else an operation takes as long as its FLOPs or its bytes at the rates of the machine,
whichever is longer, and the time that it takes to start it.
"""

import re
from typing import Final

from tessera.analysis.hlo import Computation, Instruction, Module
from tessera.analysis.timeline.operation_work import Work, is_free, work
from tessera.targets.machine import Machine
from tessera.targets.target import Target

_CYCLES: Final = re.compile(r'"estimated_cycles":"?(\d+)')


def clock_hz(target: Target) -> float | None:
    """Of the cycles that the compiler counts; None where it counts none."""
    return target.machine.clock_hz if target.platform == "tpu" else None


def operation_time(
    module: Module, target: Target, computation: Computation, instruction: Instruction
) -> tuple[str, float]:
    """Kind and seconds of an operation that is no collective and no control flow.

    Args:
      module: The program.
      target: What it was compiled for.
      computation: The one that contains the instruction.
      instruction: The operation.
    """
    if is_free(instruction):
        return "other", 0.0
    amount, clock = work(module, computation, instruction), clock_hz(target)
    seconds = roofline(target.machine, amount)
    if not clock:
        seconds += target.machine.overhead["operation"]
    elif found := _CYCLES.search(instruction.tail):
        # Scalar operations carry no cycles; they start nothing.
        seconds = int(found[1]) / clock
    return amount.kind, seconds


def roofline(machine: Machine, amount: Work) -> float:
    """Seconds of an amount of work, without the time that it takes to start it.

    Args:
      machine: The device.
      amount: What an operation computes and moves.

    Example:
      >>> from tessera.targets.machine import machine
      >>> matmul = Work("matmul", (("bfloat16", 1e12),), nbytes=1e6)
      >>> seconds = roofline(machine("h100"), matmul)
      >>> round(seconds, 6)
      0.001404
    """
    products = sum(
        flops / machine.product_rate(dtype, amount.kind)
        for dtype, flops in amount.products
    )
    return machine.seconds(products, amount.elementwise, amount.nbytes)
