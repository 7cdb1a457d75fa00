# SPDX-License-Identifier: Apache-2.0
"""What stages of a pipeline keep under each policy of rematerialization, on H100s.

    python benchmarks/pipeline_residuals.py [--models gemma3_4b llama3.1_70b]

The trainer's step in bf16, by the compiler of the GPU. Temporaries stand beside a
formula: those of ``full``, and for each slot of the residual buffer the bytes of the
residuals of a stage's layers. The formula of Megatron for the activations of a layer
(Korthikanti et al. 2022, arXiv 2205.05198) is for an MLP of four times the width,
dropout, attention that keeps no scores, and as many microbatches as there are stages.
Times are predicted from the compiled program.
"""

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import report

from tessera.foundations.config_files import configs_dir
from tessera.graph.pipelining.buffer_slots import allocate
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run
from tessera.train.runtime.devices import prepare_devices

TARGET, LENGTH, GIB = "h100:8x8", 4096, 2**30
POLICIES = ("full", "named", "dots", "none")
CASES = {
    "gemma3_4b": (
        "model.mesh_shape=[[4,2,8],[pp,fsdp,tp]]",
        "training.gradient_accumulation_steps=8",
        "training.micro_batch_size=2",
    ),
    "llama3.1_70b": (
        "model.mesh_shape=[[8,8],[pp,tp]]",
        "model.sequence_parallel=true",
        "training.gradient_accumulation_steps=32",
        "training.micro_batch_size=1",
    ),
}


def run_of(model: str, remat: str, *more: str) -> Run:
    """The trainer's run of a case."""
    words = [f"model={model}", *CASES[model], f"training.remat={remat}", *more]
    words += [f"runtime.target={TARGET}", "training.dry_run=true"]
    words += ["training.mixed_precision=bf16", f"training.sequence_length={LENGTH}"]
    config = compose(words, configs_dir()).config
    mesh = mesh_of_shape(config.model.mesh_shape, target=Target.parse(TARGET))
    return Run(config, mesh)


def residual_bytes(run: Run, policy: str) -> float:
    """Bytes that one layer keeps for each token on a device, in bf16.

    The log of the sums of attention's weights, and statistics of norms, are left out.
    """
    c, sizes = run.model.config, run.mesh.shape
    tp = sizes["tp"]
    stream = c.d_model / (tp if run.config.model.sequence_parallel else 1)
    heads = c.num_heads * c.head_dim / tp
    # Named are the heads that a device's queries use; products give all of a group.
    groups = c.num_kv_heads if c.num_kv_heads % tp else c.num_kv_heads / tp
    kv = c.head_dim * (max(1, c.num_kv_heads / tp) if policy == "named" else groups)
    each = stream + 2 * heads + 2 * kv + 2 * c.mlp_dim / tp
    return 2 * {"full": 0, "named": each}.get(policy, each + 2 * stream)


def rows(model: str, schedule: str) -> Iterator[report.Row]:
    """A row for each policy."""
    base = None
    for policy in POLICIES:
        report.progress(f"{model}, {schedule}, {policy}")
        run = run_of(model, policy, f"training.pipeline_schedule={schedule}")
        compiled = run.compiled
        temporaries, timeline = compiled.memory.temporaries, compiled.timeline
        base = base or temporaries
        table = run.step_config.schedule
        slots = allocate(table, recomputes=policy == "full").residual_slots
        tokens = run.config.training.micro_batch_size * LENGTH
        layers = run.model.split.depth
        each = residual_bytes(run, policy) * tokens * layers
        formula = base + slots * each
        yield {
            "model": model,
            "schedule": schedule,
            "remat": policy,
            "slots": slots,
            "GiB a slot": round(each / GIB, 2),
            "temporaries GiB": round(temporaries / GIB, 2),
            "formula GiB": round(formula / GIB, 2),
            "of the formula": f"{temporaries / formula:.3f}",
            "Megatron's formula GiB": round(_megatron(run, tokens) / GIB, 2),
            "step ms": round(1e3 * timeline.seconds, 1),
            "permutes beside computation %": _hidden(timeline),
        }


def _megatron(run: Run, tokens: int) -> float:
    """Activations of the first stage, none computed again but attention's scores."""
    sizes, width = run.mesh.shape, run.model.config.d_model
    tp, pp = sizes["tp"], sizes["pp"]
    whole = 10 / (tp if run.config.model.sequence_parallel else 1)
    layers = run.model.config.num_layers / pp
    return tokens * width * (whole + 24 / tp) * layers * pp


def _hidden(timeline: Any) -> float | None:
    """The share of the time of sends between stages that has computation beside it."""
    sends = [
        e for e in timeline.operations if e.axes == ("pp",) and "permute" in e.kind
    ]
    spent = sum(each.total for each in sends)
    exposed = sum(each.exposed for each in sends)
    return round(100 * (1 - exposed / spent), 1) if spent else None


def main() -> None:
    """Compile, and print a table."""
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    options = parser.parse_args()
    prepare_devices(1, "cpu")
    models = options.models[:1] if options.quick else options.models
    found = [
        row
        for model in models
        for schedule in options.schedules
        for row in rows(model, schedule)
    ]
    report.show("Residuals of stages, compiled for H100", found, options.json)


if __name__ == "__main__":
    main()
