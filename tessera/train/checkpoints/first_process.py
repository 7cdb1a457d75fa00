# SPDX-License-Identifier: Apache-2.0
"""What the first process finds or does, or its error, in every process."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils

from tessera import errors
from tessera.errors import TesseraError

_PATIENCE: Final = 15.0  # seconds
_log = logging.getLogger(__name__)


@contextmanager
def expecting_all(call: str) -> Iterator[None]:
    """Log what is wrong where the other processes do not make a call as well."""
    text = "%s waits for the other processes: every process has to call it, not rank 0 "
    timer = Timer(_PATIENCE, _log.warning, [f"{text}alone", call])
    timer.daemon = True
    if jax.process_count() > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def broadcast_from_first(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The first process's result, or its error, in every process."""
    if jax.process_count() == 1:
        return find()
    result: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            result = find()
        except TesseraError as error:
            kind = type(error).__name__
            result = {"error": [kind, error.what, error.got, error.fix]}
    content = np.frombuffer(json.dumps(result).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    content = multihost_utils.broadcast_one_to_all(np.resize(content, size))
    result = json.loads(np.asarray(content).tobytes())
    if "error" in result:
        kind, what, got, fix = result["error"]
        raise getattr(errors, kind)(what, got=got, fix=fix)
    return result
