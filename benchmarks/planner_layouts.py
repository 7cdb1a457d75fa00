# SPDX-License-Identifier: Apache-2.0
"""Step times of `tiny` in 24 layouts on eight simulated devices: measured, predicted.

    python benchmarks/planner_layouts.py --target laptop.toml:8

`benchmarks/calibrate.py --cpu-devices=8 laptop.toml` measures the target on the same
machine.
Layouts are measured in turns, several rounds of each, and the fastest round counts.
"""

import os
import statistics
import time

os.environ.setdefault("PJRT_NPROC", "32")

import jax
import report
from planner_published import spearman

from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config
from tessera.train.loop.build_run import Run
from tessera.train.loop.train_state import init_state
from tessera.train.planner.layout import Layout
from tessera.train.planner.step_time import StepModel
from tessera.train.runtime.devices import prepare_devices

COMMON = ("data=synthetic", "training.global_batch_size=64", "training.seed=0")
MANY = "training.micro_batch_size=64"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp 8": ("[[8],[dp]]", MANY),
    "fsdp 8": ("[[8],[fsdp]]", MANY),
    "dp 2, fsdp 4": ("[[2,4],[dp,fsdp]]", MANY),
    "dp 4, fsdp 2": ("[[4,2],[dp,fsdp]]", MANY),
    "fsdp 4, tp 2": ("[[4,2],[fsdp,tp]]", MANY),
    "fsdp 2, tp 4": ("[[2,4],[fsdp,tp]]", MANY),
    "dp 4, tp 2": ("[[4,2],[dp,tp]]", MANY),
    "dp 2, tp 4": ("[[2,4],[dp,tp]]", MANY),
    "dp 2, fsdp 2, tp 2": ("[[2,2,2],[dp,fsdp,tp]]", MANY),
    "fsdp 4, cp 2": ("[[4,2],[fsdp,cp]]", MANY),
    "fsdp 2, cp 4": ("[[2,4],[fsdp,cp]]", MANY),
    "dp 4, cp 2": ("[[4,2],[dp,cp]]", MANY),
    "fsdp 2, cp 2, tp 2": ("[[2,2,2],[fsdp,cp,tp]]", MANY),
    "pp 2, fsdp 4": ("[[2,4],[pp,fsdp]]", "training.micro_batch_size=4"),
    "pp 2, fsdp 2, tp 2": ("[[2,2,2],[pp,fsdp,tp]]", "training.micro_batch_size=8"),
    "pp 2, dp 4": ("[[2,4],[pp,dp]]", "training.micro_batch_size=4"),
    "pp 2, dp 4, micro 2": ("[[2,4],[pp,dp]]", "training.micro_batch_size=2"),
    "fsdp 8, full": ("[[8],[fsdp]]", MANY, "training.remat=full"),
    "fsdp 4, tp 2, full": ("[[4,2],[fsdp,tp]]", MANY, "training.remat=full"),
    "dp 8, zero 1": ("[[8],[dp]]", MANY, "training.zero_stage=1"),
    "dp 8, zero 3": ("[[8],[dp]]", MANY, "training.zero_stage=3"),
    "fsdp 8, micro 2": ("[[8],[fsdp]]", "training.micro_batch_size=2"),
    "fsdp 8, micro 4": ("[[8],[fsdp]]", "training.micro_batch_size=4"),
    "fsdp 4, tp 2, micro 4": ("[[4,2],[fsdp,tp]]", "training.micro_batch_size=4"),
}


class Compiled:
    """One layout, compiled, with a state that its steps replace."""

    def __init__(self, overrides: tuple[str, ...]) -> None:
        settings = settings_of(overrides)
        self.run = Run(settings, mesh_of_shape(settings.model.mesh_shape))
        config = self.run.step_config
        self.state = init_state(
            config.model,
            config.optimizer,
            jax.random.key(0),
            config.mesh,
            zero_stage=config.zero_stage,
        )
        self.batch = {
            name: jax.device_put(
                jax.numpy.zeros(x.shape, x.dtype)
                if name != "positions"
                else jax.lax.broadcasted_iota(x.dtype, x.shape, 2),
                x.sharding,
            )
            for name, x in self.run.abstract_batch.items()
        }

    def step(self) -> None:
        """One step, waited for."""
        self.state, metrics = self.run.step(self.state, self.batch)
        jax.block_until_ready(metrics)


def settings_of(overrides: tuple[str, ...]) -> Config:
    """The settings of a layout."""
    mesh_shape, *others = overrides
    words = [*COMMON, f"model.mesh_shape={mesh_shape}", *others]
    return compose(words, configs_dir()).config


def measured(rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of a step of each layout, in each round."""
    spent: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    layouts = {name: Compiled(overrides) for name, overrides in LAYOUTS.items()}
    for layout in layouts.values():
        layout.step()
    for _ in range(rounds):
        for name, layout in layouts.items():
            start = time.perf_counter()
            for _ in range(steps):
                layout.step()
            spent[name].append(1e3 * (time.perf_counter() - start) / steps)
    return spent


def predicted(target: Target) -> dict[str, float]:
    """Milliseconds of a step of each layout, by the planner's model."""
    model, found = None, {}
    for name, overrides in LAYOUTS.items():
        settings = settings_of(overrides)
        sizes, axes = settings.model.mesh_shape
        settings = with_batch_sizes(settings, dict(zip(axes, sizes, strict=True)))
        model = model or StepModel.of(settings, target)
        found[name] = 1e3 * model.predict(Layout.of(settings)).seconds
    return found


def main() -> None:
    """Measure, predict, compare."""
    parser = report.parser(__doc__)
    parser.add_argument("--target", required=True, help="such as laptop.toml:8")
    options = parser.parse_args()
    prepare_devices(8, "cpu")
    guesses = predicted(Target.parse(options.target))
    spent = measured(rounds=2 if options.quick else 7, steps=3)
    best = {name: min(each) for name, each in spent.items()}
    rows = [
        {
            "layout": name,
            "measured ms": round(best[name], 1),
            "median ms": round(statistics.median(spent[name]), 1),
            "predicted ms": round(guesses[name], 1),
            "ratio": round(guesses[name] / best[name], 2),
        }
        for name in sorted(best, key=lambda name: best[name])
    ]
    choice = min(guesses, key=lambda name: guesses[name])
    summary = {
        "layouts": len(rows),
        "Spearman": round(spearman([*best.values()], [*guesses.values()]), 3),
        "the planner's choice": choice,
        "its measured time over the best": round(best[choice] / min(best.values()), 3),
    }
    report.show_all({"Steps of tiny": rows, "Summary": [summary]}, options.json)


if __name__ == "__main__":
    main()
