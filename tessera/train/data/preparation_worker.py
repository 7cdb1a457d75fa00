# SPDX-License-Identifier: Apache-2.0
"""A process that makes blocks of tokens; started by ``preparation``.

It reads a pickled ``Job`` from standard input and writes its error, or None, pickled,
to standard output. It ends when its input ends: when the process that started it does.
"""

import os
import pickle
import sys
import threading

from tessera.errors import TesseraError
from tessera.train.data.preparation import describe_error, make_blocks


def main() -> None:
    """Make the blocks of one job."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    error = None
    try:
        make_blocks(job)
    except TesseraError as raised:
        error = raised
    with answer:
        answer.write(describe_error(error))


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
