# SPDX-License-Identifier: Apache-2.0
"""``dist.profile``: communication against computation of one step, per mesh axis."""

from dataclasses import dataclass
from typing import Any

from tessera.analysis.cost import Balance, balance
from tessera.analysis.flops import Flops, count
from tessera.analysis.ledger import Ledger
from tessera.errors import OutsideTraceError
from tessera.graph.function import Function, last_run
from tessera.graph.stages import Compiled


@dataclass(frozen=True)
class Profile:
    """What one execution of a step computes and sends on each device.

    Attributes:
      compiled: The program.
      flops: Its floating-point operations, all devices together.
      balance: The time at best of computing and of sending, an estimate from the
        device's peaks.
    """

    compiled: Compiled
    flops: Flops
    balance: Balance

    @property
    def collectives(self) -> Ledger:
        """Every collective of the program."""
        return self.compiled.collectives

    def as_text(self) -> str:
        """Operations, then the balance, then every collective."""
        return "\n\n".join(
            (self.flops.as_text(), self.balance.as_text(), self.collectives.as_text())
        )

    def as_json(self) -> dict[str, Any]:
        """The same figures, in bytes, seconds and FLOPs."""
        share = self.balance.communication_share
        return {
            "matmul_flops": self.flops.matmul,
            "other_flops": self.flops.other,
            "device_kind": self.balance.device_kind,
            "estimated_compute_seconds": self.balance.compute,
            "estimated_communication_share": share,
            "memory": self.compiled.memory.as_json(),
            "collectives": self.collectives.as_json(),
        }

    __str__ = as_text
    __repr__ = as_text


def profile(step: Function | None = None, *args: Any, **kwargs: Any) -> Profile:
    """Report a step's communication and computation from its compiled program.

    Bytes, calls and operations are counted; the seconds are an estimate from the
    device's peaks and say so. Nothing is run.

    Args:
      step: A ``ts.function`` or training step; None is the one that ran last.
      *args: Arguments to compile it for; without any, its last call is reported.
      **kwargs: The same by name.

    Raises:
      OutsideTraceError: [T302] nothing was run yet.
    """
    if args or kwargs:
        assert step is not None
        compiled = step.compile(*args, **kwargs)
    else:
        compiled = last_run() if step is None else step.last
    if compiled is None:
        raise OutsideTraceError(
            "there is no step to profile: none was run yet",
            fix="run one first, or pass its arguments too: dist.profile(step, batch)",
        )
    graph = compiled.traced.graph
    flops = count(graph.program)
    kind = graph.device_kind
    estimate = balance(compiled.collectives, flops, compiled.memory, kind)
    return Profile(compiled, flops, estimate)
