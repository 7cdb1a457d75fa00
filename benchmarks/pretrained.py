# SPDX-License-Identifier: Apache-2.0
"""The host memory that reading published weights takes, beside the weights themselves.

A folder with random bf16 weights of a Gemma 3, in shards of 1 GB, is read by
``from_pretrained`` in a process of its own: on one device, and on four simulated ones.
The devices' memory is the host's here, so a process holds their shares as well. What it
takes beyond them has to stay below the largest parameter.

    python benchmarks/pretrained.py [--quick] [--json PATH] [--folder FOLDER]

The folder takes 8 GB on disk (0.5 GB with ``--quick``) and is deleted at the end.
Anonymous memory is ``RssAnon`` of ``/proc/self/status``, sampled every 5 ms: pages of
mapped files are not in it, because the kernel drops them when memory is short.
"""

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MESHES: Mapping[str, tuple[list[int], list[str]]] = {
    "1 device": ([1], ["fsdp"]),
    "fsdp 4": ([4], ["fsdp"]),
    "tp 4": ([4], ["tp"]),
    "fsdp 2, tp 2": ([2, 2], ["fsdp", "tp"]),
}


def anonymous() -> int:
    """Bytes of this process that are not pages of files."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


class Peak(threading.Thread):
    """Samples anonymous memory until it is asked to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = anonymous()
        self._ends = threading.Event()

    def run(self) -> None:
        """Sample."""
        while not self._ends.wait(0.005):
            self.most = max(self.most, anonymous())

    def end(self) -> int:
        """The most that was added since the start, in bytes."""
        self._ends.set()
        self.join()
        return max(self.most, anonymous()) - self.first


def read(folder: str, mesh: str) -> dict[str, Any]:
    """Read a folder in this process; what it took."""
    from tessera.dist import simulate_devices

    sizes, axes = MESHES[mesh]
    simulate_devices(math.prod(sizes))

    import jax

    from tessera.mesh import Mesh
    from tessera.train.models import from_pretrained

    grid = Mesh(axes, range(math.prod(sizes)), sizes)
    jax.block_until_ready(jax.device_put(1.0))  # starts the backend
    peak, start = Peak(), time.perf_counter()
    peak.start()
    _, params = from_pretrained(folder, grid, dtype="bf16")
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    added = peak.end()
    leaves = jax.tree.leaves(params)
    shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
    shares = sum(shard.nbytes for shard in shards)
    return {
        "mesh": mesh,
        "s": round(seconds, 1),
        "devices' shares MB": shares // 10**6,
        "largest parameter MB": max(leaf.nbytes for leaf in leaves) // 10**6,
        "peak MB": added // 10**6,
        "beyond the shares MB": (added - shares) // 10**6,
    }


def write(folder: Path, model: str) -> int:
    """Write a folder of random weights; its bytes."""
    import ml_dtypes
    import numpy as np

    from tessera.foundations.tree import named_leaves
    from tessera.train.models import DecoderModel, config_of
    from tessera.train.models.write_folder import write_folder

    config, draw = config_of(model), np.random.default_rng(0)
    leaves = named_leaves(DecoderModel(config).abstract())
    bf16 = np.dtype(ml_dtypes.bfloat16)
    layouts = {k.replace("/", "."): (bf16, leaf.shape) for k, leaf in leaves.items()}

    def random(name: str) -> np.ndarray:
        _, shape = layouts[name]
        # Exponents below that of 2: finite, and quick to draw.
        bits = draw.integers(0, 2**14, shape, dtype=np.uint16)
        return bits.view(bf16)

    return write_folder(folder, config, layouts, random, shard_bytes=10**9)


def main() -> None:
    """Write, read on each mesh, print."""
    if len(sys.argv) > 1 and sys.argv[1] in MESHES:
        sys.stdout.write(json.dumps(read(sys.argv[2], sys.argv[1])) + "\n")
        return
    import report

    parser = report.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where there is room for it")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as parent:
        folder = Path(parent) / "model"
        report.progress("writing the folder")
        write(folder, "gemma3_270m" if options.quick else "gemma3_4b")
        for mesh in MESHES:
            report.progress(mesh)
            done = subprocess.run(
                [sys.executable, __file__, mesh, str(folder)],
                check=True,
                capture_output=True,
                text=True,
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    report.show("Anonymous memory of reading a folder", rows, options.json)


if __name__ == "__main__":
    main()
