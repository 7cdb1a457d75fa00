# SPDX-License-Identifier: Apache-2.0
"""What ``training.numerics=deterministic`` costs over ``fast``.

For each mesh: the trainer's step with either, of one model and one batch. The times
of a step alternate in one run, and their ratio is that of the medians.

    python benchmarks/numerics.py [--quick] [--json PATH]
"""

import argparse
from dataclasses import replace
from math import prod
from statistics import median

from tessera.dist import simulate_devices

simulate_devices(8)

import report  # noqa: E402
from runs import Runner, prepared, random_batch  # noqa: E402

from tessera.mesh import Mesh  # noqa: E402
from tessera.train.config.optimizer_config import AdamWConfig  # noqa: E402
from tessera.train.config.step_config import StepConfig  # noqa: E402
from tessera.train.loop.optimizers import make_optimizer  # noqa: E402
from tessera.train.loop.pipelined_model import schedule_of  # noqa: E402
from tessera.train.models.decoder.decoder_model import DecoderModel  # noqa: E402
from tessera.train.models.named_models import config_of  # noqa: E402
from tessera.train.models.pipeline_stages import split_of  # noqa: E402

MESHES = {
    "one device": {"dp": 1},
    **{axis: {axis: 4} for axis in ("dp", "fsdp", "tp", "cp")},
    "pp × fsdp": {"pp": 2, "fsdp": 2},
}
ROWS, LENGTH, MICROBATCHES, REDUCTION_PARTS = 4, 128, 4, 8


def config_on(sizes: dict[str, int]) -> StepConfig:
    """The trainer's config for a small Gemma 3 on one mesh."""
    config = replace(
        config_of("tiny"), d_model=64, num_layers=2, mlp_dim=128, global_every=2
    )
    optimizer, learning_rate = make_optimizer(AdamWConfig(), steps=100, clip_norm=1.0)
    mesh = Mesh(sizes, devices=range(prod(sizes.values())), shape=sizes.values())
    return StepConfig(
        model=DecoderModel(config, split=split_of(mesh, config, 1)),
        optimizer=optimizer,
        learning_rate=learning_rate,
        mesh=mesh,
        accumulation=MICROBATCHES,
        schedule=schedule_of(mesh, "1f1b", 1, MICROBATCHES),
    )


def compare(name: str, rounds: int) -> report.Row:
    """One row of the table: both step times, and their ratio."""
    report.progress(name)
    fast = config_on(MESHES[name])
    batch = random_batch(fast, ROWS, LENGTH)
    steps = []
    for config in (fast, replace(fast, reduction_parts=REDUCTION_PARTS)):
        found = prepared(config, batch, None)
        steps.append(Runner(found.step, found.state, batch))
    report.alternate(steps, 2)
    ours, theirs = report.alternate(steps, rounds)
    return {
        "mesh": name,
        "fast ms [quartiles]": report.spread(ours),
        "deterministic ms [quartiles]": report.spread(theirs),
        "ratio": f"{median(theirs) / median(ours):.2f}",
    }


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    rounds = 6 if options.quick else 20
    title = f"{MICROBATCHES} × {ROWS} × {LENGTH} tokens a step, {REDUCTION_PARTS} parts"
    report.show(title, [compare(name, rounds) for name in MESHES], options.json)


if __name__ == "__main__":
    main(report.arguments(__doc__))
