# SPDX-License-Identifier: Apache-2.0
"""Predicted throughput of training runs that others have published, beside theirs.

    python benchmarks/planner_published.py

Each row is a model, a layout and a figure from the source that its table names. The
programs are not Tessera's, so a row describes what its program computes: the dtype of
activations, whether attention keeps its scores on chip, what the backward pass computes
again. The rates of a device are those of its file in ``configs/target``, the same for
all rows.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import report

from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.planner.layout import Layout
from tessera.train.planner.step_time import StepModel
from tessera.train.planner.traced_matmuls import Lookup, Product
from tessera.train.planner.workload import Parameter, Recomputed, Workload

_BF16: Final = 2
_ADAM: Final = 8.0  # bytes of two moments in f32
_KEYS: Final = ("published tokens/s/device", "predicted")


@dataclass(frozen=True)
class Model:
    """A decoder in the program of whoever published the run.

    Attributes:
      layers: Blocks.
      d_model: Width.
      heads: Query heads.
      kv_heads: Key and value heads.
      head_dim: Width of one.
      mlp: Hidden width.
      vocab: Rows of the embedding.
      gated: Whether the MLP has a gate, so three matmuls.
      tied: Whether the logits use the embedding.
    """

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    gated: bool = True
    tied: bool = False

    @property
    def params(self) -> int:
        """Scalars."""
        attention = 2 * self.d_model * self.head_dim * (self.heads + self.kv_heads)
        mlp = (3 if self.gated else 2) * self.d_model * self.mlp
        tables = self.vocab * self.d_model * (1 if self.tied else 2)
        return self.layers * (attention + mlp) + tables


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      name: Of the row.
      target: Its machine.
      model: Its model.
      mesh: Axes, outermost first.
      sequence: Tokens of a sequence.
      micro: Sequences of a data-parallel group that are computed at once.
      global_batch: Sequences of a step.
      remat: What the backward pass computes again, one of ``Workload.recomputed``.
      published: Tokens per second and device.
      fused: Whether attention keeps its scores on chip and skips what is masked.
      chunks: Of an interleaved pipeline.
      gather: When its stages gather over ``fsdp``.
    """

    name: str
    target: str
    model: Model
    mesh: tuple[tuple[str, int], ...]
    sequence: int
    micro: int
    global_batch: int
    remat: str
    published: float
    fused: bool = True
    chunks: int = 1
    gather: str = "microbatch"

    @property
    def layout(self) -> Layout:
        sizes = dict(self.mesh)
        groups = sizes.get("dp", 1) * sizes.get("fsdp", 1)
        count = self.global_batch // groups // self.micro
        schedule = None
        if sizes.get("pp", 1) > 1:
            schedule = "interleaved" if self.chunks > 1 else "1f1b"
        return Layout(
            self.mesh,
            self.micro,
            count,
            remat=self.remat,
            schedule=schedule,
            chunks=self.chunks,
            gather=self.gather,
        )


def workload(model: Model, sequence: int, *, fused: bool) -> Workload:
    """What one sequence costs in a program whose activations are 16-bit."""
    d, times, rows = model.d_model, float(model.layers), float(sequence)
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = [
        ("q", d, heads, "embed", "heads", 0),
        ("k", d, kv, "embed", "kv_heads", 0),
        ("v", d, kv, "embed", "kv_heads", 0),
        ("o", heads, d, "heads", "embed", 1),
        ("up", d, model.mlp, "embed", "mlp", 2),
        ("down", model.mlp, d, "mlp", "embed", 3),
    ]
    if model.gated:
        shapes.append(("gate", d, model.mlp, "embed", "mlp", 2))
    products = [
        Product(name, times, rows, inner, outer, (before,), (after,), source, _BF16)
        for name, inner, outer, before, after, source in shapes
    ]
    table = "embedding" if model.tied else "head"
    logits = Product(table, 1, rows, d, model.vocab, ("table",), ("vocab",), 4, _BF16)
    parameters = [
        Parameter(
            name,
            (model.layers, inner, outer),
            ("layers", before, after),
            itemsize=4,
            is_trained=True,
            is_layered=True,
            state_bytes=_ADAM,
        )
        for name, inner, outer, before, after, _ in shapes
    ]
    parameters += [
        Parameter(name, (model.vocab, d), ("vocab", "table"), 4, True, False, _ADAM)
        for name in dict.fromkeys(("embedding", table))
    ]
    causal = 0.5 if fused else 1.0
    inner_flops = 4.0 * sequence**2 * heads * model.layers * causal
    # Scores go to memory and back: written by the first matmul, read and written by
    # softmax, read and written with a mask by dropout, read by the second matmul.
    scores = model.heads * sequence**2 * model.layers

    def share(*names: str) -> float:
        flops = {product.path: product.flops for product in products}
        return sum(flops[name] for name in names) / sum(flops.values())

    return Workload(
        sequence_length=sequence,
        num_layers=model.layers,
        matmul_dtype="bfloat16",
        reduced_itemsize=4,
        parameters=tuple(parameters),
        products=(*products, logits),
        lookups=(Lookup("embedding", ("vocab", "table"), sequence * d * _BF16),),
        inner_flops=inner_flops,
        inner_bytes=0.0 if fused else 13.0 * scores,
        inner_backward=2.5 if fused else 2.0,
        # Norms read the residual twice, and adding to it reads two and writes one.
        reduced_bytes=2 * 5.0 * _BF16 * sequence * d * model.layers,
        other_flops=0.0,  # memory bounds what stands between matmuls
        ends_again=0,
        recomputed={
            "none": Recomputed(0.0, 0.0),
            "dots": Recomputed(0.0, inner_flops),
            "half": Recomputed(0.5, 0.0),
            "qkv kept": Recomputed(1 - share("q", "k", "v"), inner_flops),
            "qkvo kept": Recomputed(1 - share("q", "k", "v", "o"), inner_flops),
            "full": Recomputed(1.0, inner_flops),
            "nothing_saveable": Recomputed(1.0, inner_flops),
        },
    )


_GPT = {
    "1.7B": Model(24, 2304, 24, 24, 96, 9216, 51200, False, True),
    "7.5B": Model(36, 4096, 32, 32, 128, 16384, 51200, False, True),
    "39.1B": Model(48, 8192, 64, 64, 128, 32768, 51200, False, True),
    "76.1B": Model(60, 10240, 80, 80, 128, 40960, 51200, False, True),
    "310.1B": Model(96, 16384, 128, 128, 128, 65536, 51200, False, True),
    "1008B": Model(128, 25600, 160, 160, 160, 102400, 51200, False, True),
}
_MODELS = {
    "Llama 2 13B": Model(40, 5120, 40, 40, 128, 13824, 32000),
    "Llama 2 70B": Model(80, 8192, 64, 8, 128, 28672, 32000),
    "Llama 3 8B": Model(32, 4096, 32, 8, 128, 14336, 128256),
    "Llama 3 70B": Model(80, 8192, 64, 8, 128, 28672, 128256),
    "Llama 3 405B": Model(126, 16384, 128, 8, 128, 53248, 128256),
    # MaxText's sizes by global_parameter_scale.
    "16B": Model(32, 4096, 64, 64, 128, 28672, 32000),
    "32B": Model(32, 8192, 64, 64, 128, 28672, 32000),
    "64B": Model(64, 8192, 64, 64, 128, 28672, 32000),
    "128B": Model(64, 8192, 128, 128, 128, 57344, 32000),
    "256B": Model(64, 16384, 128, 128, 128, 57344, 32000),
}


def _gpt_tokens(model: Model, tflops: float) -> float:
    """Tokens/s of a device, from TFLOP/s that count recomputation, as table 1 does."""
    width, rest = model.d_model, model.vocab / (16 * model.layers * model.d_model)
    per_token = 96 * model.layers * width**2 * (1 + 2048 / (6 * width) + rest)
    return 1e12 * tflops / per_token


def _dense_tokens(model: Model, tflops: float, sequence: int) -> float:
    """Tokens/s of a device, from TFLOP/s of 6 N and attention without a mask."""
    attention = 12 * model.layers * model.heads * model.head_dim * sequence
    return 1e12 * tflops / (6 * model.params + attention)


def _megatron(
    name: str, tp: int, pp: int, gpus: int, micro: int, batch: int, virtual: int,
    tflops: float,
) -> Run:  # fmt: skip
    model = _GPT[name]
    axes = (("pp", pp), ("dp", gpus // tp // pp), ("tp", tp))
    mesh = tuple(axis for axis in axes if axis[1] > 1 or axis[0] == "dp")
    chunks = model.layers // pp // virtual if virtual else 1
    # Under full a pipeline would keep the input of a stage alone.
    remat = "full" if pp == 1 else "nothing_saveable"
    return Run(
        f"GPT {name}", f"a100:{gpus // 8}x8", model, mesh, 2048, micro, batch,
        remat, _gpt_tokens(model, tflops), fused=False, chunks=chunks,
    )  # fmt: skip


def _fsdp(
    name: str, target: str, fsdp: int, tp: int, sequence: int, local: int, remat: str,
    published: float,
) -> Run:  # fmt: skip
    mesh = (("fsdp", fsdp), *((("tp", tp),) if tp > 1 else ()))
    label = f"{name}, fsdp {fsdp}" + f", tp {tp}" * (tp > 1)
    return Run(
        f"{label}, {remat}", target, _MODELS[name], mesh, sequence, local,
        local * fsdp, remat, published,
    )  # fmt: skip


def _maxtext(
    name: str, target: str, fsdp: int, tp: int, local: float, remat: str, tflops: float
) -> Run:
    tokens = _dense_tokens(_MODELS[name], tflops, 2048)
    batch = round(local * tp)
    return _fsdp(name, target, fsdp, tp, 2048, batch, remat, tokens)


def _llama_405b(gpus: int, cp: int, sequence: int, batch: int, tflops: float) -> Run:
    """Tensor parallel 8 and pipelines of 16 stages; ``batch`` is that of a ``dp`` rank.

    The paper does not say how many chunks a stage has, nor what its TFLOP/s count: four
    chunks, and 6 N with what a causal mask leaves of attention, are assumptions.
    """
    model, fsdp = _MODELS["Llama 3 405B"], gpus // (8 * 16 * cp)
    axes = (("pp", 16), ("fsdp", fsdp), ("cp", cp), ("tp", 8))
    mesh = tuple(axis for axis in axes if axis[1] > 1)
    attention = 6 * model.layers * model.heads * model.head_dim * sequence
    tokens = 1e12 * tflops / (6 * model.params + attention)
    return Run(
        f"405B, {gpus} GPUs, {sequence} tokens", f"h100:{gpus // 8}x8", model, mesh,
        sequence, 1, batch * fsdp, "none", tokens, chunks=4, gather="step",
    )  # fmt: skip


def tables() -> dict[str, tuple[Run, ...]]:
    """The rows by their source."""
    a100, v5e = "a100:8x8", "v5e:16x16"
    return {
        "Megatron-LM, arXiv 2104.04473, table 1 (A100)": (
            _megatron("1.7B", 1, 1, 32, 16, 512, 0, 137),
            _megatron("7.5B", 4, 1, 128, 16, 512, 0, 142),
            _megatron("39.1B", 8, 2, 512, 4, 1536, 0, 138),
            _megatron("76.1B", 8, 4, 1024, 2, 1792, 5, 140),
            _megatron("310.1B", 8, 16, 1920, 1, 2160, 3, 155),
            _megatron("1008B", 8, 64, 3072, 1, 3072, 1, 163),
        ),
        "torchtitan, docs/performance.md of 2024 (A100)": (
            _fsdp("Llama 3 8B", a100, 64, 1, 8192, 1, "dots", 2973),
            _fsdp("Llama 3 8B", a100, 64, 1, 8192, 1, "half", 2904),
            _fsdp("Llama 3 70B", a100, 64, 1, 8192, 1, "full", 331),
            _fsdp("Llama 2 13B", a100, 64, 1, 4096, 2, "none", 2162),
            _fsdp("Llama 2 13B", a100, 64, 1, 4096, 2, "half", 1914),
            _fsdp("Llama 2 70B", a100, 64, 1, 4096, 2, "full", 353),
        ),
        "torchtitan, benchmarks/llama3_h100_202412 (H100, 500 W)": (
            _fsdp("Llama 3 8B", "h100_500w:1x8", 8, 1, 8192, 2, "half", 6667),
            _fsdp("Llama 3 8B", "h100_500w:16x8", 128, 1, 8192, 2, "half", 6514),
            _fsdp("Llama 3 70B", "h100_500w:32x8", 32, 8, 8192, 16, "full", 597),
            _fsdp("Llama 3 405B", "h100_500w:16x8", 16, 8, 8192, 2, "full", 109),
        ),
        "Llama 3, arXiv 2407.21783, table 4 (H100)": (
            _llama_405b(8192, 1, 8192, 32, 430),
            _llama_405b(16384, 1, 8192, 16, 400),
            _llama_405b(16384, 16, 131072, 16, 380),
        ),
        "MaxText, configs/v5e (v5e-256)": (
            _maxtext("16B", v5e, 256, 1, 6, "full", 120),
            _maxtext("32B", v5e, 256, 1, 4, "full", 132),
            _maxtext("64B", v5e, 256, 1, 2, "full", 118),
            _maxtext("128B", v5e, 16, 16, 1, "dots", 110),
        ),
        "MaxText, configs/v5p (v5p)": (
            _maxtext("32B", "v5p:4x4x4", 16, 4, 7, "dots", 328),
            _maxtext("64B", "v5p:4x4x4", 16, 4, 3, "dots", 323),
            _maxtext("128B", "v5p:4x4x8", 16, 8, 1, "dots", 315),
            _maxtext("256B", "v5p:8x8x8", 64, 8, 1, "dots", 316),
        ),
        "MaxText, docs/reference/models/tiering.md (v5p-512, v6e-256)": (
            _fsdp("Llama 2 70B", "v5p:8x8x8", 512, 1, 4096, 4, "full", 692),
            _fsdp("Llama 3 8B", "v6e:16x16", 256, 1, 8192, 4, "qkvo kept", 7207),
            _fsdp("Llama 3 70B", "v6e:16x16", 256, 1, 8192, 5, "qkv kept", 960),
        ),
    }


def predicted(run: Run) -> tuple[float, str]:
    """Tokens/s of a device, and where the time goes."""
    words = ["model=llama3.1_8b", "training.mixed_precision=bf16"]
    sizes = {
        "num_layers": run.model.layers, "d_model": run.model.d_model,
        "num_heads": run.model.heads, "num_kv_heads": run.model.kv_heads,
        "head_dim": run.model.head_dim, "mlp_dim": run.model.mlp,
        "vocab_size": run.model.vocab,
    }  # fmt: skip
    words += [f"model.{key}={value}" for key, value in sizes.items()]
    words.append(f"training.sequence_length={run.sequence}")
    layout = run.layout
    accumulation = f"training.gradient_accumulation_steps={layout.microbatches}"
    words += [accumulation, f"training.sync_gradients_every={layout.microbatches}"]
    config = compose(words, configs_dir()).config
    work = workload(run.model, run.sequence, fused=run.fused)
    target = Target.parse(_target(run.target))
    found = StepModel(config, work, target).predict(layout)
    tokens = run.sequence * layout.global_batch_size / found.seconds
    parts = (found.compute, found.exposed, found.bubble, found.overhead)
    shares = ", ".join(f"{100 * part / found.seconds:.0f}" for part in parts)
    return tokens / target.num_devices, shares


def _target(text: str) -> str:
    """The name of a target; one that is not of a file in configs has its file here."""
    return text.replace("h100_500w", f"{os.path.dirname(__file__)}/h100_500w.toml")


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """The rank correlation of two sequences."""
    return statistics.correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [float(order.index(value)) for value in values]


def rows_of(runs: Sequence[Run]) -> list[report.Row]:
    """The rows of one table."""
    rows = []
    for run in runs:
        tokens, shares = predicted(run)
        rows.append(
            {
                "run": run.name,
                "published tokens/s/device": round(run.published, 1),
                "predicted": round(tokens, 1),
                "error %": round(100 * (tokens / run.published - 1), 1),
                "compute, exposed, bubble, overhead %": shares,
            }
        )
    return rows


def summary(found: dict[str, list[report.Row]]) -> list[report.Row]:
    """The order within each table, and the errors of all rows."""
    rows = []
    for title, each in found.items():
        ranks = spearman(*([row[key] for row in each] for key in _KEYS))
        rows.append(_summary_row(title, each) | {"Spearman": round(ranks, 2)})
    every = [row for each in found.values() for row in each]
    return [*rows, _summary_row("all", every) | {"Spearman": ""}]


def _summary_row(title: str, rows: Sequence[report.Row]) -> report.Row:
    errors = [abs(row["error %"]) for row in rows]
    return {
        "table": title,
        "rows": len(rows),
        "median error %": round(statistics.median(errors), 1),
        "worst error %": max(errors),
    }


if __name__ == "__main__":
    options = report.arguments(__doc__)
    found = {title: rows_of(runs) for title, runs in tables().items()}
    report.show_all({**found, "Summary": summary(found)}, options.json)
