# SPDX-License-Identifier: Apache-2.0
"""Arrays to files and back, by Orbax. Nothing else in Tessera knows Orbax.

Each process writes its own shards, each replica once, and reads the parts that its
devices need, whatever mesh wrote them. Nothing is compressed: trained numbers hardly
shrink, and the processor is the training's. Orbax and TensorStore read JSON and bytes;
there is no pickle on any path.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import orbax.checkpoint as ocp

Arrays: TypeAlias = Mapping[str, jax.Array]
Structs: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]

# Bytes of the least part of an array that one of several devices that hold it writes.
_LEAST_SLICE: Final = 1 << 24


def start_writing(path: Path, arrays: Arrays) -> Callable[[], None]:
    """Begin to write arrays into a new folder; every process calls it.

    It returns once the arrays may be donated or changed.

    Args:
      path: Is not there before, and not there again before all is written.
      arrays: By name.

    Returns:
      A function that waits for the end of it, for any thread to call once; it raises
      what went wrong.
    """
    _hush()
    writer = ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(
            use_compression=False, type_handler_registry=_handlers()
        )
    )
    try:
        writer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(arrays)))
    except BaseException:
        writer.close()
        raise

    def finish() -> None:
        try:
            writer.wait_until_finished()
        finally:
            writer.close()

    return finish


def read(path: Path, targets: Structs) -> dict[str, jax.Array]:
    """Read arrays, each with the shape, dtype and sharding that it has here.

    Every process calls it. Shapes and dtypes have to be those that were written: Orbax
    would cast.

    Args:
      path: What ``start_writing`` wrote.
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
    failed, the traceback of a callback that comes too late.
    """
    logging.getLogger("absl").addFilter(_is_not_orbax)
    shown = sys.unraisablehook

    def show(what: Any) -> None:
        late = isinstance(what.exc_value, RuntimeError) and what.object is None
        if not (late and str(what.exc_value) == "Event loop is closed"):
            shown(what)

    sys.unraisablehook = show


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname
