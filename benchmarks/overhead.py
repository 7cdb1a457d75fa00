# SPDX-License-Identifier: Apache-2.0
"""What a Tessera step costs over the same step written by hand.

For each mesh: the trainer's step beside ``jax.jit`` with ``NamedSharding`` of the same
model, optimizer and layouts. FLOPs are counted on the jaxpr, bytes accessed are XLA's,
collectives are read from the compiled program by kind, axes and bytes; the step times
alternate in one run, and their ratio is that of the medians.

    python benchmarks/overhead.py [--quick] [--json PATH]
"""

import argparse
from dataclasses import replace
from typing import Any

from tessera.dist import simulate_devices

simulate_devices(8)

import by_hand  # noqa: E402
import numpy as np  # noqa: E402
import report  # noqa: E402
from runs import prepared, random_batch  # noqa: E402

from tessera.analysis.flops import count  # noqa: E402
from tessera.analysis.ledger import collectives  # noqa: E402
from tessera.mesh import Mesh  # noqa: E402
from tessera.train.config.optimizer_config import AdamWConfig  # noqa: E402
from tessera.train.config.step_config import StepConfig  # noqa: E402
from tessera.train.loop.optimizers import make_optimizer  # noqa: E402
from tessera.train.models.decoder.decoder_model import DecoderModel  # noqa: E402
from tessera.train.models.named_models import config_of  # noqa: E402

MESHES = {
    "one device": ((1,), ("fsdp",)),
    "dp": ((4,), ("dp",)),
    "fsdp": ((4,), ("fsdp",)),
    "tp": ((4,), ("tp",)),
    "fsdp×tp": ((2, 2), ("fsdp", "tp")),
}
ROWS, LENGTH = 16, 128


def config_on(sizes: tuple[int, ...], axes: tuple[str, ...]) -> StepConfig:
    """The trainer's config for a small Gemma 3 on one mesh."""
    config = replace(
        config_of("tiny"), d_model=64, num_layers=2, mlp_dim=128, global_every=2
    )
    optimizer, learning_rate = make_optimizer(AdamWConfig(), steps=100, clip_norm=1.0)
    return StepConfig(
        model=DecoderModel(config),
        optimizer=optimizer,
        learning_rate=learning_rate,
        mesh=Mesh(axes, devices=range(int(np.prod(sizes))), shape=sizes),
    )


def _bytes_accessed(compiled: Any) -> float:
    """XLA's own estimate, which counts the body of a loop once."""
    return compiled.cost_analysis()["bytes accessed"]


def compare(name: str, rounds: int) -> dict[str, Any]:
    """One row of the table: what differs, and the ratio of the step times."""
    config = config_on(*MESHES[name])
    both = prepared(config, random_batch(config, ROWS, LENGTH), by_hand.sharded)
    compiled, twin = both.compiled, both.twin
    flops = [
        count(compiled.traced.graph.program).total,
        count(both.by_hand.trace(both.state, both.batch).jaxpr).total,
    ]
    accessed = [_bytes_accessed(each) for each in (compiled.jax, twin)]
    sent = [collectives(each, config.mesh).totals() for each in (compiled.jax, twin)]
    runs = both.runners()
    report.alternate(runs, 3)
    seconds = report.alternate(runs, rounds)
    medians = [float(np.median(each)) for each in seconds]
    return {
        "mesh": name,
        "FLOPs": _same(*flops),
        "bytes accessed": _same(*accessed),
        "collectives": "equal" if sent[0] == sent[1] else f"{sent[0]} | {sent[1]}",
        "operations": sum(total.operations for total in sent[0].values()),
        "sent per device": sum(total.nbytes for total in sent[0].values()),
        "Tessera ms": report.spread(seconds[0]),
        "by hand ms": report.spread(seconds[1]),
        "ratio": round(medians[0] / medians[1], 4),
    }


def _same(ours: float, theirs: float) -> str:
    return f"{ours:.6g}, equal" if ours == theirs else f"{ours:.6g} | {theirs:.6g}"


def main(options: argparse.Namespace) -> None:
    """Compare on every mesh and show the table."""
    rounds = 10 if options.quick else 150
    names = ("one device", "fsdp×tp") if options.quick else MESHES
    rows = [compare(name, rounds) for name in names]
    report.show("Tessera's step beside the same step by hand", rows, options.json)


if __name__ == "__main__":
    main(report.arguments(__doc__))
