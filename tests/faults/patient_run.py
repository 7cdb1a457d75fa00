# SPDX-License-Identifier: Apache-2.0
"""A run that is in a call without an end when it is asked to end; no handler runs.

python patient_run.py 2                 # seconds of its grace period
"""

import ctypes
import sys

from tessera.runtime.cluster import Cluster
from tessera.runtime.processes import joined

if __name__ == "__main__":
    with joined(Cluster(source="a test"), {}, grace=float(sys.argv[1])) as here:
        assert here.goes_on()
        sys.stdout.write("waiting\n")
        sys.stdout.flush()
        # Without the interpreter's lock, as in a compiler; a signal does not end it.
        for _ in range(600):
            ctypes.CDLL(None).sleep(600)
