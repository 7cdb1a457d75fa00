# SPDX-License-Identifier: Apache-2.0
"""``tessera train``, and ``run_training.py``: training, with a planned layout if asked.

The trainer does not know the planner, which is made of its settings and its step. So
``model.mesh_shape=auto`` and ``training.remat=auto`` are replaced here, before the
trainer reads the command line. Help is shown without them.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from tessera.train.runtime.python_process import module_command

_AUTO = {"model.mesh_shape=auto", "training.remat=auto"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit code.

    Args:
      arguments: None takes the process's own.
    """
    from tessera.train.config.command_line import asks_for_help
    from tessera.train.loop.main import main as train

    words = list(sys.argv[1:] if arguments is None else arguments)
    if asks_for_help(words):
        return train([word for word in words if word not in _AUTO])
    if _AUTO.isdisjoint(words):
        return train(words)
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    flags = [word for word in words if word not in overrides]
    done = subprocess.run(
        module_command("tessera.train.planner.auto_layout"),
        input=json.dumps(words),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        return done.returncode
    overrides, notes = json.loads(done.stdout.splitlines()[-1])
    return train([*flags, *overrides], notes)
