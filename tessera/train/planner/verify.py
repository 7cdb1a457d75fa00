# SPDX-License-Identifier: Apache-2.0
"""Compiles the best layouts for the target, in processes side by side.

The compiler's memory, and the timeline of its schedule, replace the estimates. A layout
that turns out not to fit makes room for the next one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from tessera.errors import TesseraError
from tessera.foundations.config_files import configs_dir
from tessera.train.planner.search import Candidate
from tessera.train.runtime.python_process import module_command

TIMEOUT: Final = 900.0
"""Seconds after which the compiler of a layout is stopped."""


def verify(
    candidates: Sequence[Candidate],
    words: Sequence[str],
    capacity: int,
    *,
    wanted: int,
    processes: int,
    note: Callable[[Candidate], object] = repr,
) -> list[Candidate]:
    """Compile candidates in their order until so many fit.

    Args:
      candidates: Fastest first.
      words: The command line that the overrides of a layout are added to.
      capacity: Bytes of a device.
      wanted: How many that fit to look for; at most three times as many are compiled.
      processes: How many to compile at the same time.
      note: Called with each result when it is there.

    Returns:
      All that were compiled; those that fit first, by the time of a step.
    """
    found: list[Candidate] = []
    remaining = list(candidates[: 3 * wanted])
    with ThreadPoolExecutor(processes) as pool:
        while missing := wanted - sum(each.is_safe for each in found):
            if not remaining:
                break
            batch, remaining = remaining[:missing], remaining[missing:]
            lines = [[*words, *each.layout.overrides()] for each in batch]
            for estimate, figures in zip(batch, pool.map(_compile, lines), strict=True):
                found.append(_verified(estimate, figures, capacity))
                note(found[-1])
    return sorted(found, key=lambda each: (not each.is_safe, each.prediction.seconds))


def default_processes() -> int:
    """Compilers that run side by side: one for each core, up to four."""
    return max(1, min(4, os.cpu_count() or 1))


def _compile(words: list[str]) -> dict[str, Any]:
    """What a process of its own says about a layout."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        done = subprocess.run(
            module_command(__name__),
            input=json.dumps(words),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the compiler took more than {TIMEOUT:.0f} s"}
    lines = done.stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        last = [*done.stderr.splitlines(), f"exit code {done.returncode}"][-1]
        return {"error": f"the compiler ended without an answer: {last[:200]}"}


def _verified(estimate: Candidate, figures: dict[str, Any], capacity: int) -> Candidate:
    if "error" in figures:
        code = f"[{figures['code']}] " if "code" in figures else ""
        return replace(estimate, is_safe=False, problem=code + figures["error"])
    before = estimate.prediction
    bubble = figures["compute"] * before.bubble / (before.compute + before.bubble)
    prediction = replace(
        before,
        compute=figures["compute"] - bubble,
        exposed=figures["exposed"],
        bubble=bubble,
        overhead=figures["idle"],
        memory_bytes=figures["memory"],
        compiled=True,
    )
    fits = figures["memory"] <= capacity
    return Candidate(estimate.layout, prediction, fits)


def figures(words: list[str]) -> dict[str, Any]:
    """What the compiler of the target says about the step of a command line.

    Returns:
      ``memory`` in bytes of a device at most; and from the timeline, in seconds of one
      step, ``compute``, ``exposed`` communication and ``idle``. Or ``error``, where
      that time is unknown.
    """
    from tessera.mesh import Mesh
    from tessera.train.config.command_line import compose
    from tessera.train.config.layout_checks import target_of
    from tessera.train.loop.build_run import Run
    from tessera.train.runtime.devices import prepare_devices

    prepare_devices(1, "cpu")
    settings = compose(words, configs_dir()).config
    mesh = Mesh.from_shape(settings.model.mesh_shape, target=target_of(settings))
    run = Run(settings, mesh)
    run.check()
    timeline = run.compiled.timeline
    if count := timeline.unknown_collectives:
        return {"error": f"the time of {count} collectives is unknown"}
    return {
        "memory": run.compiled.memory.peak,
        "compute": timeline.compute,
        "exposed": timeline.exposed,
        "idle": timeline.idle,
    }


def main() -> int:
    """Compile what the input says, in a process of its own, and write its figures.

    The input has the words of a command line as JSON, the output one JSON object. 0 is
    also for a layout that is refused.
    """
    words = json.loads(sys.stdin.read())
    try:
        found = figures(words)
    except TesseraError as error:
        found = {"code": error.code, "error": error.what, "got": error.got}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0
