# SPDX-License-Identifier: Apache-2.0
"""Start a program in several processes: ``tessera launch --nprocs=4 train …``.

No module that the launcher uses imports JAX: the
process that watches the others uses no device.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from tessera.train.runtime.exit_codes import exit_on_stop_signals, shows_errors


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Launch what the command line asks for; returns the exit code of the whole run."""
    with exit_on_stop_signals():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: Sequence[str]) -> int:
    # Here, because these imports take a while.
    from tessera.train.runtime.launch_options import make_plan
    from tessera.train.runtime.launcher import Launcher

    plan = make_plan(arguments, os.environ)
    if plan.shows_help:
        return subprocess.call(plan.command)
    return Launcher(plan, os.environ).run()


if __name__ == "__main__":
    sys.exit(main())
