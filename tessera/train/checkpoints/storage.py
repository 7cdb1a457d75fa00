# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the arrays of a checkpoint; the only module that uses Orbax.

Each process writes its own shards, one replica of each, and reads the blocks that its
devices need, whichever mesh wrote them. Nothing is compressed: trained parameters
hardly shrink, and training needs the processor. Orbax and TensorStore read JSON and
bytes; nothing is unpickled.
"""

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tessera.errors import CheckpointNotFoundError, printable
from tessera.train.files.regular_files import read_regular
from tessera.train.files.untrusted_json import parse_json

Arrays: TypeAlias = Mapping[str, jax.Array | np.ndarray]
Structs: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]

# The smallest share, in bytes, of a replicated array that one device writes.
_MIN_SLICE: Final = 1 << 24
_DATABASE: Final = "manifest.ocdbt"
# Orbax writes 500 bytes for an array.
_LONGEST_RECORD: Final = 2**25

# The path as well as the package, as a user's folder may be called orbax, too. Errors
# of TensorStore have no traceback, but name a file in the folder that Orbax writes to.
_ORBAX: Final = (
    "orbax.checkpoint",
    str(Path(ocp.__file__).parent),
    ".orbax-checkpoint-tmp/",
)


class ArrayWrite:
    """An asynchronous write of arrays to a new folder; every process starts one.

    The constructor returns once the arrays may be donated or changed.

    Args:
      path: Must not exist; it appears once everything is written.
      arrays: By name.

    Raises:
      OSError: The write cannot start.
    """

    def __init__(self, path: Path, arrays: Arrays) -> None:
        _silence_orbax()
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
        """Wait until everything is written, in any thread; call it once.

        Raises:
          OSError: The write failed.
        """
        self._try(lambda writer: writer.wait_until_finished())
        self._writer.close()

    def _try(self, act: Callable[[Any], None]) -> None:
        message: str | None = None
        try:
            act(self._writer)
        except Exception as error:  # of many types; TensorStore raises ValueError
            message = str(error) or type(error).__name__
        if message is not None:
            # After the handler: the exception would keep Orbax's objects alive.
            with suppress(Exception):
                self._writer.close()
            del self._writer
            raise OSError(message)


def collect_failed_writes() -> None:
    """Garbage-collect a failed write, without a warning for each array."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()


def read(path: Path, targets: Structs) -> dict[str, Any]:
    """Read arrays with the given shapes, dtypes and shardings; in every process.

    A target without a sharding is read as a NumPy array.

    Shapes and dtypes have to be those that were written: Orbax would cast silently.

    Args:
      path: The folder that ``ArrayWrite`` wrote.
      targets: Some or all of the arrays.

    Raises:
      CheckpointNotFoundError: [T801] they cannot be read.
    """
    _silence_orbax()
    restore_args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if target.sharding is None
        else ocp.ArrayRestoreArgs(
            sharding=target.sharding, global_shape=target.shape, dtype=target.dtype
        )
        for name, target in targets.items()
    }
    arguments = ocp.args.PyTreeRestore(
        item=dict(targets), restore_args=restore_args, partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(path.absolute(), args=arguments)
    except jax.errors.JaxRuntimeError:  # of a device, such as one without memory
        raise
    except Exception as error:  # of many types
        # What Orbax adds is how it reads; TensorStore says what it cannot read.
        text = str(error.__cause__ or error) or type(error).__name__
        raise CheckpointNotFoundError(
            "the arrays of a checkpoint cannot be read",
            got=f"{path}: {printable(text, longest=400)}",
            fix="use the checkpoint before it",
        ) from error


def layouts(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every array of a folder, as Orbax recorded them.

    Raises:
      ValueError: Orbax cannot read its record, or an array is compressed, which
        Tessera's are not: a few megabytes may be gigabytes of zeros.
    """
    _silence_orbax()
    try:
        for file in _records(path):
            text = read_regular(file, _LONGEST_RECORD)
            if file.name != _DATABASE:
                parse_json(text, longest=_LONGEST_RECORD)
        # The first process alone may call this: it waits for no other.
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            arrays = reader.metadata(path.absolute()).item_metadata.tree
        for name, array in arrays.items():
            stored = array.storage.zarr_metadata
            if stored.zarr_format != 2 or stored.compression is not None:
                raise ValueError(f"{name} is compressed")
        return {
            name: (jnp.dtype(array.dtype).name, tuple(array.shape))
            for name, array in arrays.items()
        }
    except Exception as error:  # of many types
        raise ValueError(str(error) or type(error).__name__) from error


def _records(path: Path) -> Iterator[Path]:
    """The files that Orbax and TensorStore read whole, before any array."""
    yield from path.glob("_*")
    yield from path.glob("array_metadatas/*")
    yield from path.glob(_DATABASE)
    yield from path.glob(f"*/{_DATABASE}")


@cache
def _handlers() -> Any:
    """Orbax handlers that divide a replicated array among devices only if it is large.

    By default they slice small arrays too, with a compiled program for each shape: the
    first checkpoint of a run made the loop wait for most of a second.
    """
    handler = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_MIN_SLICE
    )
    return ocp.type_handlers.create_type_handler_registry(
        (jax.Array, handler), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )


@cache
def _silence_orbax() -> None:
    """Suppress output of Orbax that repeats the errors that it raises.

    These are its log and, for each array that was still being written when another one
    failed, one more error or the traceback of a late callback.
    """
    logging.getLogger("absl").addFilter(_is_not_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_orbax)
    original = sys.unraisablehook

    def show(what: Any) -> None:
        is_late = isinstance(what.exc_value, RuntimeError) and what.object is None
        if not (is_late and str(what.exc_value) == "Event loop is closed"):
            original(what)

    sys.unraisablehook = show


def _is_not_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    return not any(
        name in text
        for text in (record.pathname, str(record.msg), *files)
        for name in _ORBAX
    )
