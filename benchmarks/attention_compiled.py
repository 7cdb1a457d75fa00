# SPDX-License-Identifier: Apache-2.0
"""Attention as the compilers of TPUs schedule it: JAX's kernels beside XLA's blocks.

    python benchmarks/attention_compiled.py [--quick] [--json PATH]

Forward and backward pass of causal attention, compiled and not run. For XLA's blocks
the compiler writes its cycles beside each operation. It writes none beside a kernel,
but has one instruction bundle for each cycle: the cycles of a kernel are the bundles of
its loop, those in branches as often as these are taken. Neither counts waiting for
memory; of a device with two cores, the figures of kernels are as if one ran them.
"share of peak" is FLOPs of the visited blocks at the peak of the matrix units
over these cycles. It needs ``pip install 'tessera-spmd[targets-tpu]'`` and no TPU.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import multiprocessing
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import report

from tessera import function
from tessera.analysis.hlo import parse
from tessera.analysis.timeline.operation_work import work
from tessera.mesh import Mesh
from tessera.ops.attention import splash
from tessera.ops.attention.dispatch import Options
from tessera.ops.attention.flash import flash_attention
from tessera.targets.target import Target
from tessera.train.runtime.devices import prepare_devices

TARGETS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
BATCH, HEADS, GROUPS, LENGTH = 2, 8, 4, 4096
CORES = {"v5p": 2}  # of a device, one of which runs a kernel's step
_BUNDLE = re.compile(r" *(?:0x[0-9a-f]+|0) +\S*: (>*) *\{")
_SPILL = re.compile(r"vst \[vmem:\[#allocation\d+_spill")
_BRANCH = re.compile(r"sbr\.rel \(\S+\) target = \$region(\d+)")
_END = re.compile(r"empty region (\d+)")


@dataclass(frozen=True)
class Case:
    """A call: width of the heads, window, and whether rows are packed and capped."""

    width: int
    window: int | None = None
    packed: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        window = "causal" if self.window is None else f"window {self.window}"
        packed = ", segments, soft cap" if self.packed else ""
        return f"D {self.width}, {window}{packed}"


CASES = (
    Case(64),
    Case(128),
    Case(256),
    Case(256, 1024),
    Case(128, packed=True),
)


def compiled(target: str, case: Case, implementation: str) -> Any:
    """The output and the gradients of one call."""

    def run(q: Any, k: Any, v: Any, gradient: Any, ids: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return flash_attention(
                *(q, k, v),
                causal=True,
                window=case.window,
                soft_cap=50.0 if case.packed else None,
                segment_ids=ids if case.packed else None,
                implementation=implementation,
            )

        out, backward = jax.vjp(attend, q, k, v)
        return out, backward(gradient)

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    queries = array(BATCH, HEADS, LENGTH, case.width)
    keys = array(BATCH, GROUPS, LENGTH, case.width)
    mesh = Mesh(["dp"], shape=(1,), target=target)
    ids = array(BATCH, LENGTH, dtype="int32")
    return function(mesh=mesh)(run).compile(queries, keys, keys, queries, ids)


def loop_bundles(schedule: str) -> tuple[int, int, int]:
    """Bundles of a kernel's loop: always, per visited block, and at others' ends.

    The body of a branch ends where its target begins. The one with matmuls computes a
    block; those of the other innermost branches begin and end a block's results.
    """
    lines = schedule.splitlines()
    inside = [i for i, line in enumerate(lines) if (b := _BUNDLE.match(line)) and b[1]]
    ends = {found[1]: i for i, x in enumerate(lines) for found in _END.finditer(x)}
    bodies = [
        (i, ends[found[1]])
        for i in inside
        if (found := _BRANCH.search(lines[i])) and ends.get(found[1], 0) > i
    ]
    innermost = [
        (start, stop)
        for start, stop in bodies
        if not any(start < other < stop for other, _ in bodies)
    ]
    block = edges = 0
    for start, stop in innermost:
        body = [lines[i] for i in inside if start < i < stop]
        if any("vmatmul" in line for line in body):
            block += len(body)
        else:
            edges += len(body)
    return len(inside) - block - edges, block, edges


def kernel_rows(target: str, case: Case) -> tuple[list[report.Row], float, int]:
    """What each kernel costs, by the compiler's last schedule of it.

    In a process of its own, whose compiler writes all schedules to files.

    Returns:
      A row for each kernel, the cycles of the whole program, and its temporaries.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        )
        prepare_devices(1, "cpu")
        program = compiled(target, case, "splash")
        module, rows = parse(program.as_text()), []
        for computation in module.computations.values():
            for each in computation.instructions.values():
                found = re.match(r"splash_mha_(fwd|dq|dkv)", each.name)
                if found and each.opcode == "custom-call":
                    (file,) = Path(folder).glob(f"*-{each.name}-*-final_bundles.txt")
                    ((_, flops),) = work(module, computation, each).products
                    row = kernel_row(target, case, found[1], file.read_text(), flops)
                    rows.append({"target": target, "case": case.name, **row})
    others = [e for e in program.timeline.operations if e.kind != "attention"]
    cycles = sum(e.total for e in others) * Target.parse(target).machine.clock_hz
    cycles += sum(row["Mcycles"] for row in rows) * 1e6
    return rows, cycles, program.memory.temporaries


def kernel_row(
    target: str, case: Case, name: str, schedule: str, flops: float
) -> report.Row:
    """The figures of one kernel."""
    step, block, edges = loop_bundles(schedule)
    tables = tables_of(case)
    info = tables.dkv_mask_info if name == "dkv" else tables.fwd_mask_info
    heads = BATCH * HEADS
    visits = heads * int((info.block_mask > 0).sum())
    rows = info.block_mask.shape[2 if name == "dkv" else 1]
    cycles = step * heads * info.block_mask.size + block * visits + edges * heads * rows
    machine = Target.parse(target).machine
    peak = machine.flops["bfloat16"] / machine.clock_hz / CORES.get(machine.name, 1)
    return {
        "kernel": name,
        "cycles a block": block,
        "cycles a step": step,
        "Mcycles": round(cycles / 1e6, 2),
        "share of peak": round(flops / peak / cycles, 2),
        "vector spills": len(_SPILL.findall(schedule)),
    }


def tables_of(case: Case) -> Any:
    """The tables of the kernels of a case."""
    blocks = splash.SequenceBlocks.of(LENGTH, splash.MAX_BLOCK)
    options = Options(True, 1.0, case.window)
    mask = splash.BandMask.of(blocks, blocks, options)
    return splash._kernel(mask, 50.0 if case.packed else None, False)


def main() -> None:
    """Compile every case for every target; print both tables."""
    options = report.arguments(__doc__)
    prepare_devices(1, "cpu")
    spawn = multiprocessing.get_context("spawn")
    totals, kernels = [], []
    for target in TARGETS[: 1 if options.quick else None]:
        clock = Target.parse(target).machine.clock_hz
        for case in CASES[: 2 if options.quick else None]:
            report.progress(f"{target}, {case.name}")
            with ProcessPoolExecutor(1, mp_context=spawn) as other:
                rows, cycles, nbytes = other.submit(kernel_rows, target, case).result()
            blocks = compiled(target, case, "xla")
            of_blocks = sum(e.total for e in blocks.timeline.operations) * clock
            kernels += rows
            totals.append(
                {
                    "target": target,
                    "case": case.name,
                    "splash Mcycles": round(cycles / 1e6, 2),
                    "xla Mcycles": round(of_blocks / 1e6, 2),
                    "xla / splash": round(of_blocks / cycles, 2),
                    "splash MiB": round(nbytes / 2**20, 1),
                    "xla MiB": round(blocks.memory.temporaries / 2**20, 1),
                }
            )
    title = (
        f"{BATCH} × {HEADS} query heads, {GROUPS} of keys, {LENGTH} tokens, bf16, "
        f"libtpu {version('libtpu')}"
    )
    report.show_all({title: totals, "kernels": kernels}, options.json)


if __name__ == "__main__":
    main()
