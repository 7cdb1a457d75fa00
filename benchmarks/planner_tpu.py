# SPDX-License-Identifier: Apache-2.0
"""Twelve layouts of gemma3_1b on v5e:4x4: the planner's estimate, and the compiler's.

    python benchmarks/planner_tpu.py

TPU's compiler writes its own cycles beside each operation. What the planner expects of
computation is compared with their sum over a step, and what it expects of the whole
step with the cycles and the collectives of the schedule. It needs
``pip install 'tessera-spmd[targets-tpu]'`` and no TPU; a layout takes half a minute.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import report
from planner_published import spearman

from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run
from tessera.train.planner.layout import Layout
from tessera.train.planner.step_time import StepModel
from tessera.train.runtime.devices import prepare_devices

TARGET = "v5e:4x4"
# Mesh, microbatch, microbatches, policy: 64 sequences of 2,048 tokens in each.
LAYOUTS = (
    ("[[16],[fsdp]]", 4, 1, "full"),
    ("[[8,2],[fsdp,tp]]", 8, 1, "full"),
    ("[[4,4],[fsdp,tp]]", 16, 1, "full"),
    ("[[2,8],[dp,fsdp]]", 4, 1, "full"),
    ("[[4,4],[dp,fsdp]]", 4, 1, "full"),
    ("[[4,4],[dp,fsdp]]", 1, 4, "full"),
    ("[[16],[fsdp]]", 1, 4, "full"),
    ("[[16],[fsdp]]", 2, 2, "dots"),
    ("[[8,2],[fsdp,cp]]", 8, 1, "full"),
    ("[[4,4],[fsdp,cp]]", 16, 1, "full"),
    ("[[8,2],[fsdp,tp]]", 2, 4, "dots"),
    ("[[2,8],[pp,fsdp]]", 1, 8, "full"),
)


def main() -> None:
    """Compile, predict, compare."""
    options = report.arguments(__doc__)
    prepare_devices(1, "cpu")
    target, model, rows = Target.parse(TARGET), None, []
    for mesh, micro, count, remat in LAYOUTS[: 3 if options.quick else None]:
        report.progress(f"{mesh}, {count} microbatches of {micro}, {remat}")
        words = [
            "model=gemma3_1b",
            f"model.mesh_shape={mesh}",
            "training.mixed_precision=bf16",
            "training.sequence_length=2048",
            f"training.micro_batch_size={micro}",
            f"training.gradient_accumulation_steps={count}",
            f"training.remat={remat}",
            f"runtime.target={TARGET}",
            "training.dry_run=true",
        ]
        settings = compose(words, configs_dir()).config
        model = model or StepModel.of(settings, target)
        estimate = model.predict(Layout.of(settings))
        placed = mesh_of_shape(settings.model.mesh_shape, target=target)
        timeline = Run(settings, placed).compiled.timeline
        rows.append(
            {
                "layout": f"{mesh}, {count} × {micro}, {remat}",
                "estimate ms": round(1e3 * estimate.seconds, 1),
                "of computation ms": round(
                    1e3 * (estimate.compute + estimate.bubble), 1
                ),
                "timeline ms": round(1e3 * timeline.seconds, 1),
                "its cycles ms": round(1e3 * timeline.compute, 1),
                "its exposed ms": round(1e3 * timeline.exposed, 1),
            }
        )
    rows.sort(key=lambda row: row["timeline ms"])

    def rank(estimate: str, measure: str) -> float:
        estimates, measures = (
            [row[name] for row in rows] for name in (estimate, measure)
        )
        return round(spearman(estimates, measures), 3)

    summary = {
        "layouts": len(rows),
        "Spearman of the step": rank("estimate ms", "timeline ms"),
        "of computation": rank("of computation ms", "its cycles ms"),
        "of the step with cycles alone": rank("estimate ms", "its cycles ms"),
    }
    report.show_all(
        {f"gemma3_1b on {TARGET}": rows, "Summary": [summary]}, options.json
    )


if __name__ == "__main__":
    main()
