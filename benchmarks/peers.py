# SPDX-License-Identifier: Apache-2.0
"""Training throughput of one and the same decoder in Tessera and beside it.

The contestants have the same shapes, first weights, optimizer (Adam), batches and
dtype, and their losses are compared. Each is a process of its own, and they take their
steps in turns. ``jax`` is what people write: matmuls of three-dim arrays, JAX's own
attention, ``log_softmax``; ``jax_scanned`` the same with ``lax.scan`` over its layers;
``flax`` is Flax without Tessera. PyTorch takes part where there is one: in this Python,
or in the one that ``--torch-python`` names, which needs torch and NumPy alone.

A time is the least of all steps, with their median and the middle half beside it. The
processor's time is that of all threads together, which a busy machine hardly changes,
though PyTorch's threads wait in it. MFU is the share of ``--peak-tflops``: six FLOPs
for each multiplied parameter and token and a causal attention's half of 12 · layers ·
width · length; nothing recomputed counts.

    python benchmarks/peers.py [--quick] [--json PATH] [--torch-python PATH]
    python benchmarks/peers.py --size 1.3B --length 4096 --rows 4 --peak-tflops 989
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import report

FOLDER = Path(__file__).parent / "peer_programs"
sys.path.append(str(FOLDER))

from peer_process import PeerProcess  # noqa: E402
from peer_setting import CONTESTANTS, SETTINGS, Setting  # noqa: E402

AGREE = {"f32": 1e-3, "bf16": 3e-2}  # of losses, relative


class Contestant(PeerProcess):
    """A process that takes steps when it is asked to, and what they took."""

    def __init__(self, name: str, python: str, setting: Setting, *more: str) -> None:
        self.name = name
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.losses: list[float] = []
        self.peak = 0
        given = [name, json.dumps(asdict(setting)), *more]
        super().__init__(
            [python, str(FOLDER / "worker.py"), *given],
            {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"},
        )
        self.version = self.answer()["version"]

    def run(self, steps: int, *, counts: bool = True) -> None:
        """Take steps; the first ones compile, and do not count."""
        answer = self.ask(steps)
        self.losses += answer["losses"]
        self.peak = answer["peak"]
        if counts:
            self.wall += answer["wall"]
            self.processor += answer["processor"]


def measured(
    names: Iterable[str], pythons: dict[str, str], setting: Setting, rounds: int
) -> list[Contestant]:
    """All contestants, after as many rounds of two steps each."""
    found = []
    try:
        for name in names:
            report.progress(f"{name} compiles")
            contestant = Contestant(name, pythons[name], setting)
            found.append(contestant)
            contestant.run(3, counts=False)
        for contestant in report.in_turns(found, rounds):
            contestant.run(2)
    finally:
        for contestant in found:
            contestant.close()
    return found


def rows_of(
    found: list[Contestant], setting: Setting, peak_tflops: float | None
) -> list[report.Row]:
    """A line for each contestant, beside plain JAX or else the first one."""
    first = next((each for each in found if each.name == "jax"), found[0])
    rows = []
    for each in found:
        least = min(each.wall)
        pairs = zip(each.losses, first.losses, strict=True)
        apart = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        row = {
            "contestant": each.name,
            "tokens/s": round(setting.tokens / least),
            "ms": f"{least * 1e3:.0f}",
            "all steps, ms": report.spread(each.wall),
            f"beside {first.name}": round(min(first.wall) / least, 3),
            "processor, ms": f"{min(each.processor) * 1e3:.0f}",
            f"processor beside {first.name}": round(
                min(first.processor) / min(each.processor), 3
            ),
            "losses apart": f"{apart:.1e}",
            "last loss": f"{statistics.mean(each.losses[-4:]):.4f}",
            "host GB": round(each.peak / 1e9, 2),
            "with": each.version,
        }
        if peak_tflops:
            row["MFU"] = f"{setting.flops / least / peak_tflops / 1e12:.1%}"
        rows.append(row)
        if apart > AGREE[setting.dtype]:
            raise SystemExit(
                f"{each.name} does not train as {first.name} does: its losses differ "
                f"by {apart:.1e}\n{each.losses}\n{first.losses}"
            )
    return rows


def main(options: argparse.Namespace) -> None:
    """Run the contestants and show the table."""
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    given = {"length": options.length, "rows": options.rows, "dtype": options.dtype}
    setting = replace(
        SETTINGS[options.size], **{name: x for name, x in given.items() if x}
    )
    pythons = dict.fromkeys(CONTESTANTS, sys.executable)
    with_torch = [name for name in CONTESTANTS if name.startswith("torch")]
    names = options.contestants or list(CONTESTANTS)
    if options.torch_python:
        pythons |= dict.fromkeys(with_torch, options.torch_python)
    elif importlib.util.find_spec("torch") is None:
        names = [name for name in names if name not in with_torch]
        report.progress("no torch in this Python, and no --torch-python: left out")
    if options.quick:
        names = [name for name in names if name in ("tessera", "jax")]
    rounds = 3 if options.quick else options.rounds
    rows = rows_of(
        measured(names, pythons, setting, rounds), setting, options.peak_tflops
    )
    sizes = ", ".join(itertools.starmap("{} {}".format, asdict(setting).items()))
    title = f"One decoder of {setting.parameters / 1e6:.1f}M parameters ({sizes})"
    report.show(title, rows, options.json)


def options_of() -> argparse.Namespace:
    """The arguments."""
    parser = report.parser(__doc__)
    parser.add_argument("--size", choices=SETTINGS, default="7M")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--rows", type=int, help="sequences of a batch")
    parser.add_argument("--dtype", choices=AGREE, help="of matmuls")
    parser.add_argument("--rounds", type=int, default=10, help="of two steps each")
    parser.add_argument("--cores", type=int, help="processor cores to use")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS)
    parser.add_argument("--torch-python", help="a Python that has torch")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for MFU")
    return parser.parse_args()


if __name__ == "__main__":
    main(options_of())
