# SPDX-License-Identifier: Apache-2.0
"""The decoder of ``peers.py``; one contestant at a time has the GPU's memory."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Final

from gpu_steps.rows import QUICK, ROOT, emit, errors_kept
from peer_setting import SETTINGS, Setting

WORKER: Final = ROOT / "benchmarks/peer_programs/worker.py"
# Dense bf16 of an H100 or H200, which MFU is a share of.
PEAK_FLOPS: Final = 989e12
SIZES: Final = {
    "0.3B": dataclasses.replace(SETTINGS["0.3B"], length=2048, rows=8),
    # As many rows as plain JAX's activations, none recomputed, leave room for on 80 GB.
    "1.3B": dataclasses.replace(SETTINGS["1.3B"], length=4096, rows=2),
}


def worker(name: str, setting: Setting) -> "subprocess.Popen[str]":
    """A process that takes steps when it reads how many."""
    return subprocess.Popen(
        [sys.executable, str(WORKER), name, json.dumps(dataclasses.asdict(setting))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PJRT_NPROC"},
    )


def answer(process: "subprocess.Popen[str]", steps: int | None = None) -> Any:
    """Its next line of JSON, after it was asked for steps."""
    assert process.stdin is not None
    assert process.stdout is not None
    if steps is not None:
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        code = process.wait(10)
        raise RuntimeError(f"the contestant ended with {code}: see the log")
    return json.loads(line)


def measured(name: str, setting: Setting, limit: float) -> dict[str, Any]:
    """Seconds of twelve steps after three, and the losses of all."""
    start = time.perf_counter()
    process = worker(name, setting)
    timer = threading.Timer(600 if QUICK else limit, process.kill)
    timer.start()
    try:
        version = answer(process)["version"]
        first = answer(process, 3)
        until_warm = time.perf_counter() - start
        rest = answer(process, 3 if QUICK else 12)
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
    return {
        "version": version,
        "wall": rest["wall"],
        "losses": first["losses"] + rest["losses"],
        "until_warm": until_warm,
    }


def compare(size: str, names: list[str], limit: float) -> None:
    """A row for each contestant; losses are compared with the first's."""
    size = "tiny" if QUICK else size
    setting = (SETTINGS | SIZES)[size]
    losses: list[float] | None = None
    for name in names:
        known = {
            "size": size,
            "length": setting.length,
            "rows": setting.rows,
            "who": name,
        }
        with errors_kept("peers", **known):
            found = measured(name, setting, limit)
            losses = losses or found["losses"]
            pairs = zip(found["losses"], losses, strict=True)
            median = statistics.median(found["wall"])
            emit(
                "peers",
                **known,
                ms=round(1e3 * median, 1),
                least_ms=round(1e3 * min(found["wall"]), 1),
                tokens_s=round(setting.tokens / median),
                mfu=round(setting.flops / median / PEAK_FLOPS, 4),
                losses_apart=max(abs(a / b - 1) for a, b in pairs),
                until_warm_s=round(found["until_warm"], 1),
                version=found["version"],
            )


def contestants(*names: str) -> list[str]:
    """Without PyTorch's where it is not installed."""
    return [n for n in names if not n.startswith("torch") or find_spec("torch")]


def peers_1b() -> None:
    """PyTorch before JAX, which was measured already."""
    names = ("tessera",) if QUICK else ("tessera", "torch_compiled", "jax_scanned")
    compare("1.3B", contestants(*names), 90)


def peers_03b() -> None:
    names = ("tessera", "torch_compiled", "jax_scanned", "jax")
    compare("0.3B", contestants(*(names[::2] if QUICK else names)), 90)


def torch_cache() -> None:
    """Fill the cache of ``torch.compile``: a first compilation takes over a minute.

    In the first runs on an H200 both sizes took more than 85 s beside other steps, and
    0.3B took 22 s afterwards.
    """
    if find_spec("torch") is None:
        emit("torch_cache", skipped="no PyTorch")
        return
    sizes = {"tiny": SETTINGS["tiny"]} if QUICK else SIZES

    def fill(size: str) -> None:
        start = time.perf_counter()
        with errors_kept("torch_cache", size=size):
            process = worker("torch_compiled", sizes[size])
            answer(process)
            answer(process, 2)
            process.kill()
            process.communicate()
            spent = round(time.perf_counter() - start, 1)
            emit("torch_cache", size=size, seconds=spent)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, reversed(sizes)))
