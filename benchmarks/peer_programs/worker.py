# SPDX-License-Identifier: Apache-2.0
"""One contestant in a process of its own: reads how many steps, writes what they took.

    python worker.py CONTESTANT SETTING_AS_JSON [BATCHES]

Every line of its input is a number of steps; it answers with a line of JSON: seconds of
each step, from wall clock and of the process's processor time, and the losses.
"""

import itertools
import json
import resource
import sys
import time
from typing import Any

from peer_setting import Setting

BATCHES = 4  # made once, taken in turns, unless an argument says how many


def contestant(name: str, setting: Setting) -> Any:
    """Its step and state, and the version of what it is made with."""
    if name.startswith("torch"):
        import peer_torch
        import torch

        torch.set_float32_matmul_precision("highest")
        step, state = peer_torch.step_of(setting, compiled=name == "torch_compiled")
        return step, state, f"torch {torch.__version__}"
    import jax

    version = f"jax {jax.__version__}"
    if name == "flax":
        import flax
        import peer_flax

        return *peer_flax.step_of(setting), f"flax {flax.__version__}, {version}"
    if name == "tessera":
        import peer_tessera

        return *peer_tessera.step_of(setting), version
    import peer_jax

    return *peer_jax.step_of(setting, scanned=name == "jax_scanned"), version


def main(name: str, given: str, kept: str = str(BATCHES)) -> None:
    """Make the contestant, and take steps as they are asked for."""
    setting = Setting(**json.loads(given))
    out = sys.stdout
    sys.stdout = sys.stderr  # Whatever a library prints is no answer.
    step, state, version = contestant(name, setting)
    batches = itertools.cycle(itertools.islice(setting.batches(), int(kept)))
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        wall, processor, losses = [], [], []
        for _ in range(int(line)):
            begin, used = time.perf_counter(), time.process_time()
            state, loss = step(state, *next(batches))
            losses.append(float(loss))
            wall.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = {"wall": wall, "processor": processor, "losses": losses, "peak": peak}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
