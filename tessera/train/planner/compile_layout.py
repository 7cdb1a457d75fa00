# SPDX-License-Identifier: Apache-2.0
"""Compiles one layout for its target, in a process of its own.

``main`` reads the words of a command line as a JSON list from the input, and writes one
JSON object: what the compiler and the timeline say, or the error.
"""

import json
import sys
from typing import Any

from tessera.errors import TesseraError
from tessera.foundations.config_files import configs_dir


def figures(words: list[str]) -> dict[str, Any]:
    """What the compiler of the target says about the step of a command line.

    Returns:
      ``memory`` in bytes of a device at most; and from the timeline, in seconds of one
      step, ``compute``, ``exposed`` communication and ``idle``.
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
    return {
        "memory": run.compiled.memory.peak,
        "compute": timeline.compute,
        "exposed": timeline.exposed,
        "idle": timeline.idle,
    }


def main() -> int:
    """Compile what the input says; 0, also for a layout that is refused."""
    words = json.loads(sys.stdin.read())
    try:
        found = figures(words)
    except TesseraError as error:
        found = {"code": error.code, "error": error.what, "got": error.got}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0
