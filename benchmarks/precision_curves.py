# SPDX-License-Identifier: Apache-2.0
"""Loss curves in f32, in bf16 and under autocast, in Tessera and in PyTorch.

The decoder, its first weights and its batches are those of ``peers.py``, but every
batch is new. ``f32`` and ``bf16`` are the dtype of matmuls and activations,
``autocast`` is the f32 program under ``torch.autocast`` or ``ts.autocast`` to bf16. A
curve is compared with PyTorch's in f32: its largest distance, and that of its mean over
the last tenth, in thousandths of the loss. How far apart two f32 programs come, by the
order of their sums alone, is in the row of Tessera's f32. Without PyTorch, in this
Python or the one that ``--torch-python`` names, Tessera's f32 is the one to compare
with.

    python benchmarks/precision_curves.py --torch-python PATH --size 270M --steps 20
"""

import argparse
import importlib.util
import statistics
import sys
from dataclasses import replace

import report
from peers import SETTINGS, Contestant, Setting

CURVES = (
    ("torch", "f32"),
    ("torch", "autocast"),
    ("tessera", "f32"),
    ("tessera", "bf16"),
    ("tessera", "autocast"),
)


def curve_of(name: str, python: str, setting: Setting, steps: int) -> Contestant:
    """The contestant after its steps, in a process that has ended."""
    report.progress(f"{name} in {setting.dtype}")
    contestant = Contestant(name, python, setting, str(steps))
    try:
        contestant.run(steps)
    finally:
        contestant.close()
    return contestant


def row_of(found: Contestant, dtype: str, first: Contestant) -> report.Row:
    """Its distances from the first curve."""
    last = max(len(found.losses) // 10, 1)
    ends = [statistics.mean(each.losses[-last:]) for each in (found, first)]
    pairs = zip(found.losses, first.losses, strict=True)
    return {
        "program": found.name,
        "dtype": dtype,
        "first loss": round(found.losses[0], 4),
        "end": round(ends[0], 4),
        "end, thousandths apart": round(1e3 * (ends[0] / ends[1] - 1), 2),
        "most, thousandths apart": round(
            1e3 * max(abs(ours / theirs - 1) for ours, theirs in pairs), 2
        ),
        "with": found.version,
    }


def main(options: argparse.Namespace) -> None:
    """Train in every dtype and show the table."""
    steps = 5 if options.quick else options.steps
    setting = SETTINGS[options.size]
    torch_python = options.torch_python or sys.executable
    pythons = {"torch": torch_python, "tessera": sys.executable}
    chosen = list(CURVES)
    if options.torch_python is None and importlib.util.find_spec("torch") is None:
        chosen = [(name, dtype) for name, dtype in CURVES if name != "torch"]
        report.progress("no torch in this Python, and no --torch-python: left out")
    curves = [
        curve_of(name, pythons[name], replace(setting, dtype=dtype), steps)
        for name, dtype in chosen
    ]
    rows = [
        row_of(found, dtype, curves[0])
        for found, (_, dtype) in zip(curves, chosen, strict=True)
    ]
    title = f"{steps} steps of {setting.parameters / 1e6:.1f}M parameters"
    report.show(f"{title}, {setting.tokens} tokens each", rows, options.json)


def options_of() -> argparse.Namespace:
    """The arguments."""
    parser = report.parser(__doc__)
    parser.add_argument("--size", choices=SETTINGS, default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--torch-python", help="a Python that has torch")
    return parser.parse_args()


if __name__ == "__main__":
    main(options_of())
