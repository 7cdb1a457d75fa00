# SPDX-License-Identifier: Apache-2.0
"""A run in miniature: the phases of a training run around a sum over all ranks.

    tessera launch --nprocs=2 small_run.py fault=raise on=1 phase=step

``fault`` happens on rank ``on`` when step 2, or compiling, begins. What it prints, the
tests of this folder read.
"""

import ctypes
import hashlib
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tessera.train.runtime.cluster import detect
from tessera.train.runtime.devices import prepare_devices
from tessera.train.runtime.process_group import Processes, Timeouts, joined

OPTIONS = {
    "fault": "none",
    "on": "1",
    "phase": "step",
    "steps": "3",
    "rendezvous": "120",
    "deadline": "600",
    "attempts": "99",
    "seed": "0",
    "seed_of_rank_1": "",
    "folder": "a",
}


def main() -> None:
    options = {**OPTIONS, **dict(given.split("=", 1) for given in sys.argv[1:])}
    if options["fault"] == "listen":
        # A rank that hears nothing; the one that listens hears it nevertheless.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cluster = detect(os.environ)
    say(f"pid {os.getpid()}: {cluster}")
    seed = (cluster.rank == 1 and options["seed_of_rank_1"]) or options["seed"]
    with joined(
        cluster,
        {"configuration": {"training.seed": seed}},
        shared=f"{options['folder']} of process {os.getpid()}",
        platform="cpu",
        # Longer than any test: what ends sooner does not end by these.
        timeouts=Timeouts(float(options["rendezvous"]), 600, 600),
        deadlines={"compile": 600.0, "step": float(options["deadline"])},
    ) as here:
        say(f"attempt {here.attempt} shares {here.shared}")
        run(here, options)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(here: Processes, options: dict[str, str]) -> None:
    say(prepare_devices(here.count, "cpu", num_processes=here.count))
    here.watchdog.enter("compile")
    misbehave(here, options, "compile")
    if options["fault"] == "vanish":
        # In a long phase without collectives, one rank is killed from outside.
        say("waiting")
        sleep_for_ever()
    sharding = NamedSharding(
        jax.make_mesh((here.count,), ("dp",), axis_types=(AxisType.Auto,)),
        PartitionSpec("dp"),
    )
    odd = options["fault"] == "odd" and here.rank == int(options["on"])
    rows = jax.make_array_from_callback(
        (here.count,), sharding, lambda index: np.ones(1, np.float32)
    )
    lowered = jax.jit(lambda x: jnp.sum(x * (2.0 if odd else 1.0))).lower(rows)
    text = lowered.as_text()
    key = hashlib.sha256(text.encode()).hexdigest()[:8]
    here.compare("step", key, {"lines": str(len(text.splitlines()))})
    step = lowered.compile()
    step(rows).block_until_ready()  # The processes connect, which no step waits for.
    for number in range(1, int(options["steps"]) + 1):
        here.watchdog.enter("step", number)
        if number == 2:
            misbehave(here, options, "step")
        say(f"step {number}: {float(step(rows)):g}")


def misbehave(here: Processes, options: dict[str, str], phase: str) -> None:
    """Do what was asked for, if this is the rank, the phase and the attempt."""
    mine = here.rank == int(options["on"]) and phase == options["phase"]
    if not mine or here.attempt >= int(options["attempts"]):
        return
    if options["fault"] == "raise":
        try:
            {}["first"]
        except KeyError as error:
            raise RuntimeError("the step is broken") from error
    faults: dict[str, Any] = {
        "none": lambda: None,
        "odd": lambda: None,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "sleep": lambda: sleep_for_ever(),
        # A call that keeps the interpreter's lock: no thread of Python runs meanwhile.
        "hold": lambda: ctypes.PyDLL(None).sleep(600),
        "listen": lambda: listen(),
    }
    faults[options["fault"]]()


def sleep_for_ever() -> None:
    time.sleep(600)


def listen() -> None:
    """Say what signals come; a SIGTERM is ignored as JAX's own handler does."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda n, _: say(f"got {signal.Signals(n).name}"))
    say("listening")
    for _ in range(6000):
        time.sleep(0.1)


if __name__ == "__main__":
    main()
