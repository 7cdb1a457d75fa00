# SPDX-License-Identifier: Apache-2.0
"""Start a program in several processes: ``python -m tessera.launch --nprocs=4 …``.

The door to ``tessera.runtime``'s launcher, none of whose modules imports JAX: the
process that watches the others holds no device.
"""

import os
import sys

from tessera.runtime.exit_codes import end_when_asked

if __name__ == "__main__":
    end_when_asked()  # before the other imports, which take a while

from tessera.errors import TesseraError
from tessera.runtime.launch_options import make_plan
from tessera.runtime.launcher import Launcher


def main() -> int:
    """Launch what the command line asks for; the exit code of the whole run."""
    try:
        plan = make_plan(sys.argv[1:], os.environ)
    except TesseraError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return Launcher(plan, os.environ).run()


if __name__ == "__main__":
    sys.exit(main())
