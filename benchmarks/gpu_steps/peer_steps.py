# SPDX-License-Identifier: Apache-2.0
"""The decoder of ``peers.py``; one contestant at a time has the GPU's memory."""

import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Final

from gpu_steps.rows import QUICK, ROOT, emit, errors_kept
from peer_process import PeerProcess
from peer_setting import SETTINGS, Setting

WORKER: Final = ROOT / "benchmarks/peer_programs/worker.py"
# Dense bf16 of an H100 or H200, which MFU is a share of.
PEAK_FLOPS: Final = 989e12
SIZES: Final = {
    "0.3B": dataclasses.replace(SETTINGS["0.3B"], length=2048, rows=8),
    # As many rows as plain JAX's activations, none recomputed, leave room for on 80 GB.
    "1.3B": dataclasses.replace(SETTINGS["1.3B"], length=4096, rows=2),
}


def worker(name: str, setting: Setting) -> PeerProcess:
    """A process that takes steps when it reads how many."""
    return PeerProcess(
        [sys.executable, str(WORKER), name, json.dumps(dataclasses.asdict(setting))],
        {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"},
    )


def measured(name: str, setting: Setting, limit: float) -> dict[str, Any]:
    """Seconds of twelve steps after three, and the losses of all."""
    start = time.perf_counter()
    peer = worker(name, setting)
    timer = threading.Timer(600 if QUICK else limit, peer.process.kill)
    timer.start()
    try:
        version = peer.answer()["version"]
        first = peer.ask(3)
        until_warm = time.perf_counter() - start
        rest = peer.ask(3 if QUICK else 12)
    finally:
        timer.cancel()
        peer.process.kill()
        peer.close()
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
            peer = worker("torch_compiled", sizes[size])
            peer.answer()
            peer.ask(2)
            peer.process.kill()
            peer.close()
            spent = round(time.perf_counter() - start, 1)
            emit("torch_cache", size=size, seconds=spent)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, reversed(sizes)))
