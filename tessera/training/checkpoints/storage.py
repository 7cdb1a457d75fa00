# SPDX-License-Identifier: Apache-2.0
"""Arrays to files and back, by Orbax. Nothing else in Tessera knows Orbax.

Each process writes its own shards, each replica once, and reads the parts that its
devices need, whatever mesh wrote them. Nothing is compressed: trained numbers hardly
shrink, and the processor is the training's. Orbax and TensorStore read JSON and bytes;
there is no pickle on any path.
"""

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final, TypeAlias

import jax
import orbax.checkpoint as ocp

Arrays: TypeAlias = Mapping[str, jax.Array]
Structs: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]

# Bytes of the least part of an array that one of several devices that hold it writes.
_LEAST_SLICE: Final = 1 << 24

# A user's folder may be called orbax, too.
_ORBAX: Final = ("orbax.checkpoint", str(Path(ocp.__file__).parent))


class Writing:
    """Arrays on their way into a new folder; every process makes one.

    Making it takes until the arrays may be donated or changed.

    Args:
      path: Is not there before, and not there again before all is written.
      arrays: By name.

    Raises:
      OSError: It cannot even begin.
    """

    def __init__(self, path: Path, arrays: Arrays) -> None:
        _hush()
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False, type_handler_registry=_handlers()
        )
        self._writer = ocp.AsyncCheckpointer(handler)
        self._try(
            lambda writer: writer.save(
                path.absolute(), args=ocp.args.PyTreeSave(dict(arrays))
            )
        )

    def finish(self) -> None:
        """Wait for the end of it, in any thread; once.

        Raises:
          OSError: What went wrong.
        """
        self._try(lambda writer: writer.wait_until_finished())
        self._writer.close()

    def _try(self, act: Callable[[Any], None]) -> None:
        said: str | None = None
        try:
            act(self._writer)
        except Exception as error:  # of many kinds; TensorStore's is ValueError
            said = str(error) or type(error).__name__
        if said is not None:
            # Outside of the handler: the error would hold on to all that Orbax was at.
            with suppress(Exception):
                self._writer.close()
            del self._writer
            raise OSError(said)


def clear_up() -> None:
    """Collect what a failed writing left, without a word of each part of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()


def read(path: Path, targets: Structs) -> dict[str, jax.Array]:
    """Read arrays, each with the shape, dtype and sharding that it has here.

    Every process calls it. Shapes and dtypes have to be those that were written: Orbax
    would cast.

    Args:
      path: What ``Writing`` wrote.
      targets: Some or all of the arrays, with shardings.
    """
    _hush()

    def how(target: jax.ShapeDtypeStruct) -> Any:
        return ocp.ArrayRestoreArgs(
            sharding=target.sharding, global_shape=target.shape, dtype=target.dtype
        )

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(
            path.absolute(),
            args=ocp.args.PyTreeRestore(
                item=dict(targets),
                restore_args={name: how(target) for name, target in targets.items()},
                partial_restore=True,
            ),
        )


@cache
def _handlers() -> Any:
    """How Orbax writes: a copy is shared out among its devices only if it is large.

    By default each small array is cut as well, by a program for each shape: the first
    checkpoint of a run let the loop wait for most of a second.
    """
    handler = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_LEAST_SLICE
    )
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))


@cache
def _hush() -> None:
    """Leave out what Orbax writes beside the errors that it raises, which have it all.

    That is its log, and, of each array that was still being written when another one
    failed, its error too, or the traceback of a callback that comes too late.
    """
    logging.getLogger("absl").addFilter(_is_not_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_orbax)
    shown = sys.unraisablehook

    def show(what: Any) -> None:
        late = isinstance(what.exc_value, RuntimeError) and what.object is None
        if not (late and str(what.exc_value) == "Event loop is closed"):
            shown(what)

    sys.unraisablehook = show


def _is_not_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    return not any(
        name in said
        for said in (record.pathname, str(record.msg), *files)
        for name in _ORBAX
    )
