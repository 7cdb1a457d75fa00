# SPDX-License-Identifier: Apache-2.0
"""Memory of layouts of Gemma 3: by the planner's model, and by the target's compiler.

    python benchmarks/planner_memory.py --targets h100 v5p

The compilers need their packages, ``tessera-spmd[targets-cuda13,targets-tpu]``, and no
accelerator. A layout of H100 takes some seconds, one of v5p half a minute.
"""

import os
import statistics
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import report

from tessera.errors import DeviceMemoryError
from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config
from tessera.train.loop.build_run import Run
from tessera.train.planner.layout import Layout
from tessera.train.planner.memory_model import is_safe
from tessera.train.planner.step_time import StepModel
from tessera.train.runtime.devices import prepare_devices

# Model, tokens of a sequence, target, mesh, microbatch, policy, other settings. Rules
# of the model were found without the last four of H100, the last one of v5p, and those
# that are about as large as a device.
LAYOUTS: tuple[tuple[str, int, str, str, int, str, tuple[str, ...]], ...] = (
    ("270m", 2048, "h100:1x8", "[[8],[fsdp]]", 8, "full", ()),
    ("270m", 2048, "h100:1x8", "[[4,2],[fsdp,tp]]", 4, "none", ()),
    ("270m", 2048, "h100:1x8", "[[8],[dp]]", 4, "dots", ("zero_stage=1",)),
    ("270m", 2048, "h100:1x8", "[[4,2],[fsdp,tp]]", 8, "full", ()),
    ("270m", 4096, "h100:1x8", "[[4,2],[fsdp,cp]]", 4, "full", ()),
    ("270m", 2048, "h100:1x8", "[[2,4],[pp,fsdp]]", 2, "full", ("steps=8",)),
    ("270m", 2048, "h100:1x8", "[[2,4],[dp,fsdp]]", 4, "dots", ("steps=4",)),
    ("1b", 4096, "h100:1x8", "[[8],[fsdp]]", 2, "full", ()),
    ("1b", 4096, "h100:1x8", "[[8],[fsdp]]", 2, "dots", ()),
    ("1b", 4096, "h100:1x8", "[[8],[fsdp]]", 2, "none", ()),
    ("1b", 4096, "h100:2x8", "[[8,2],[fsdp,tp]]", 4, "full", ()),
    ("1b", 2048, "h100:2x8", "[[8,2],[fsdp,tp]]", 4, "dots", ()),
    ("1b", 2048, "h100:1x8", "[[8],[dp]]", 2, "full", ()),
    ("1b", 2048, "h100:1x8", "[[8],[dp]]", 2, "full", ("offload_optimizer=true",)),
    ("1b", 4096, "h100:2x8", "[[2,8],[pp,fsdp]]", 2, "full", ("steps=8",)),
    ("4b", 8192, "h100:2x8", "[[16],[fsdp]]", 1, "full", ()),
    ("4b", 8192, "h100:2x8", "[[8,2],[fsdp,tp]]", 2, "full", ()),
    ("4b", 4096, "h100:2x8", "[[2,8],[fsdp,tp]]", 2, "dots", ()),
    ("4b", 8192, "h100:2x8", "[[4,4],[fsdp,tp]]", 2, "full", ("steps=4",)),
    ("4b", 2048, "h100:2x8", "[[8,2],[fsdp,tp]]", 1, "none", ()),
    ("270m", 1024, "h100:1x8", "[[2,2,2],[dp,fsdp,tp]]", 16, "dots", ()),
    ("1b", 8192, "h100:2x8", "[[4,4],[dp,fsdp]]", 1, "full", ("zero_stage=2",)),
    ("4b", 4096, "h100:4x8", "[[32],[fsdp]]", 2, "dots", ()),
    ("4b", 8192, "h100:2x8", "[[16],[fsdp]]", 8, "full", ("steps=4",)),
    ("270m", 2048, "v5p:2x2x2", "[[8],[fsdp]]", 8, "full", ()),
    ("270m", 2048, "v5p:2x2x2", "[[4,2],[fsdp,tp]]", 4, "dots", ()),
    ("270m", 2048, "v5p:2x2x2", "[[8],[dp]]", 2, "none", ()),
    ("1b", 4096, "v5p:2x2x4", "[[8,2],[fsdp,tp]]", 4, "full", ()),
    ("1b", 4096, "v5p:2x2x4", "[[16],[fsdp]]", 2, "full", ()),
    ("1b", 4096, "v5p:2x2x4", "[[16],[fsdp]]", 2, "dots", ()),
    ("4b", 8192, "v5p:2x2x4", "[[8,2],[fsdp,tp]]", 2, "full", ()),
    ("4b", 8192, "v5p:2x2x4", "[[16],[fsdp]]", 1, "full", ()),
    ("4b", 4096, "v5p:2x2x4", "[[16],[fsdp]]", 1, "dots", ()),
    ("270m", 2048, "v5p:2x2x2", "[[2,4],[pp,fsdp]]", 2, "full", ("steps=8",)),
    ("1b", 2048, "v5p:2x2x2", "[[2,4],[dp,fsdp]]", 4, "dots", ()),
    # About as large as a device, or larger.
    ("1b", 4096, "h100:2x8", "[[2,8],[fsdp,cp]]", 32, "dots", ("steps=2",)),
    ("1b", 4096, "h100:1x8", "[[8],[fsdp]]", 7, "dots", ()),
    ("1b", 4096, "h100:1x8", "[[8],[fsdp]]", 3, "none", ()),
    ("4b", 8192, "h100:2x8", "[[16],[fsdp]]", 3, "dots", ()),
    ("4b", 8192, "h100:2x8", "[[2,8],[dp,fsdp]]", 12, "full", ()),
    ("4b", 8192, "v5p:2x2x4", "[[16],[fsdp]]", 3, "dots", ()),
    ("1b", 4096, "v5p:2x2x4", "[[16],[fsdp]]", 8, "dots", ()),
)


def settings_of(row: tuple[str, int, str, str, int, str, tuple[str, ...]]) -> Config:
    """The settings of a row."""
    model, length, target, mesh, micro, remat, others = row
    words = [
        f"model=gemma3_{model}",
        f"model.mesh_shape={mesh}",
        "training.mixed_precision=bf16",
        f"training.sequence_length={length}",
        f"training.micro_batch_size={micro}",
        f"training.remat={remat}",
        f"runtime.target={target}",
        "training.dry_run=true",
    ]
    for other in others:
        name = other.replace("steps=", "gradient_accumulation_steps=")
        words.append(f"training.{name}")
    return compose(words, configs_dir()).config


def rows(names: list[str]) -> Iterator[report.Row]:
    """One row for each layout of the targets with these names."""
    models: dict[tuple[str, int, str], StepModel] = {}
    for row in LAYOUTS:
        name, length, place, mesh, micro, remat, others = row
        if place.partition(":")[0] not in names:
            continue
        report.progress(f"gemma3_{name} on {place}, {mesh}, {remat}")
        settings, target = settings_of(row), Target.parse(place)
        key = name, length, place
        models[key] = models.get(key) or StepModel.of(settings, target)
        estimate = models[key].memory(Layout.of(settings)).total
        placed = mesh_of_shape(settings.model.mesh_shape, target=target)
        peak: float | None = None
        try:
            peak = Run(settings, placed).compiled.memory.peak
        except DeviceMemoryError:  # which the compiler of a TPU raises
            report.progress("  needs more than a device has")
        fits = peak is not None and peak <= target.machine.memory_bytes
        yield {
            "model": name,
            "tokens": length,
            "target": place,
            "layout": f"{mesh}, microbatch {micro}, {remat} {' '.join(others)}".strip(),
            "compiler GiB": round(peak / 2**30, 2) if peak else "too large",
            "predicted GiB": round(estimate / 2**30, 2),
            "error %": round(100 * (estimate / peak - 1), 1) if peak else "",
            "called safe": is_safe(estimate, target.machine),
            "fits": fits,
        }


def main() -> None:
    """Compile, predict, compare."""
    parser = report.parser(__doc__)
    parser.add_argument("--targets", nargs="+", default=["h100", "v5p"])
    options = parser.parse_args()
    prepare_devices(1, "cpu")
    found = list(rows(options.targets))
    errors = [row["error %"] for row in found if row["error %"] != ""]
    summary = {
        "layouts": len(found),
        "that do not fit": sum(not row["fits"] for row in found),
        "median error %": round(statistics.median(map(abs, errors)), 1),
        "worst below %": min(errors),
        "worst above %": max(errors),
        "called safe and does not fit": sum(
            row["called safe"] and not row["fits"] for row in found
        ),
    }
    report.show_all({"Memory of a device": found, "Summary": [summary]}, options.json)


if __name__ == "__main__":
    main()
