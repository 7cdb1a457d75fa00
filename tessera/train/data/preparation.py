# SPDX-License-Identifier: Apache-2.0
"""Makes the tokens of a corpus once, in parallel, into a cache of blocks.

The units of a corpus are grouped into blocks, which are named after the content of
their files (by path, size, inode and times of change), the tokenizer and the settings
that change tokens. Blocks that exist are not made again. The others are made by worker
processes, each of which takes the next block that nobody has locked. So a preparation
that was killed continues with the blocks that are missing, and several runs or hosts
with one cache folder share the work.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from tessera.errors import BadRecordError, TesseraError, TokenCacheError
from tessera.train.data.data_config import RECORDS, DataConfig
from tessera.train.data.encoding import Encoder
from tessera.train.data.file_ranges import Unit
from tessera.train.data.records import Record, unread_records
from tessera.train.data.shards import (
    FORMAT,
    BlockWriter,
    StoredBlock,
    new_block,
    read_block,
)
from tessera.train.data.table_files import PARQUET
from tessera.train.data.tokenization import tokenizer_files
from tessera.train.data.worker_process import (
    READER_BYTES,
    WorkerDiedError,
    WorkerProcess,
)
from tessera.train.files.file_locks import lock

_log: Final = logging.getLogger("tessera")

# All other settings do. The tokenizer counts by the content of its files.
_NO_CHANGE_OF_TOKENS: Final = frozenset(
    {"path", "sources", "tokenizer", "validation_fraction"}
    | {"prefetch", "num_workers", "cache_dir", "synthetic"}
)
# They change no tokens of other sources, whose blocks are older than these settings.
_OF_RECORDS: Final = frozenset({"prompt_key", "chosen_key", "rejected_key"})
# Small files share a block of this size; larger ones come as units of about as much.
_BLOCK_BYTES: Final = 16 * 2**20
# Less text than this is encoded before another process has started.
_WORKER_BYTES: Final = 16 * 2**20
_POLL_SECONDS: Final = 0.2
# Records after a bad one that are looked at, too.
_LOOK_AHEAD: Final = 500


@dataclass(frozen=True)
class Task:
    """Consecutive units, and the block of their tokens.

    Attributes:
      units: The units, in the order of the text.
      folder: The folder of the block.
      num_bytes: About their size in the files, to choose the number of processes.
    """

    units: tuple[Unit, ...]
    folder: Path
    num_bytes: int


def cache_folder(config: DataConfig) -> Path:
    """``data.cache_dir``, or ``tessera/tokens`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = config.cache_dir or os.path.join(base, "tessera", "tokens")
    return Path(folder).expanduser().absolute()


def prepare(
    sides: Sequence[Sequence[Unit]], encoder: Encoder
) -> tuple[list[list[StoredBlock]], set[str]]:
    """The tokens of some units, made now or by an earlier run.

    Args:
      sides: The units of the training and of the validation text.
      encoder: The tokenizer, with the settings of one source of text.

    Returns:
      The blocks of each side, and the keys of records that were ignored.

    Raises:
      TokenRangeError: [T604] a text has a token that the model does not have.
      TokenCacheError: [T608] the cache cannot be written or is damaged, or a worker was
        killed.
      TesseraError: What ``read_records`` and ``Encoder.encode`` raise.
    """
    config = encoder.config
    folder = cache_folder(config) / _settings_fingerprint(config)
    tasks = [list(_tasks(units, folder)) for units in sides]
    _make_missing([task for side in tasks for task in side], encoder, folder)
    blocks = [[read_block(task.folder) for task in side] for side in tasks]
    ignored = set[str]()
    for task, block in zip(chain(*tasks), chain(*blocks), strict=True):
        ignored.update(block.ignored)
        if any(shard.largest_id >= encoder.vocab_size for shard in block.shards):
            # Made for a larger model; reading it again names the text and raises.
            for _ in _encode(task, [task], encoder, set()):
                pass
    return blocks, ignored


def _settings_fingerprint(config: DataConfig) -> str:
    """The tokenizer, and everything else that changes the tokens of a text."""
    digest = hashlib.blake2b(digest_size=8)
    unread = _NO_CHANGE_OF_TOKENS
    if config.name not in RECORDS:
        unread |= _OF_RECORDS
    settings = {
        one.name: getattr(config, one.name)
        for one in dataclasses.fields(config)
        if one.name not in unread
    }
    digest.update(repr((FORMAT, sorted(settings.items()))).encode())
    for path in tokenizer_files(config.tokenizer_name):
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
        for library in ("tokenizers", "jinja2"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                digest.update(f"{library} {metadata.version(library)}".encode())
    return digest.hexdigest()


def _tasks(units: Iterable[Unit], folder: Path) -> Iterator[Task]:
    group: list[Unit] = []
    size = 0
    for unit in units:
        is_whole = not unit.begin and unit.end is None
        unit_size = unit.status.st_size if is_whole else _BLOCK_BYTES
        if group and size + unit_size > _BLOCK_BYTES:
            yield _task(group, folder)
            group = list[Unit]()
            size = 0
        group.append(unit)
        size += unit_size
    if group:
        yield _task(group, folder)


def _task(units: Sequence[Unit], folder: Path) -> Task:
    digest = hashlib.blake2b(digest_size=16)
    for unit in units:
        digest.update(f"{unit.identity}\n".encode())
    num_bytes = sum(min(unit.status.st_size, _BLOCK_BYTES) for unit in units)
    return Task(tuple(units), folder / digest.hexdigest(), num_bytes)


# --- making blocks


def _make_missing(tasks: Sequence[Task], encoder: Encoder, folder: Path) -> None:
    if not (missing := _missing(tasks)):
        return
    with _writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    useful = 1 + sum(task.num_bytes for task in missing) // _WORKER_BYTES
    most = encoder.config.num_workers or usable_cores()
    count = min(most, len(missing), useful)
    _log.info(
        "making the tokens of %d blocks of text, %d at a time", len(missing), count
    )
    # Tables are decompressed in a process that may take no more than some memory.
    has_tables = any(unit.format == PARQUET for task in missing for unit in task.units)
    if count == 1 and not has_tables:
        _make_blocks(missing, encoder)
    else:
        _run_workers(missing, encoder, count)


def _missing(tasks: Sequence[Task]) -> list[Task]:
    return [task for task in tasks if not task.folder.exists()]


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _make_blocks(missing: Sequence[Task], encoder: Encoder) -> None:
    """Make every block that does not exist, beside other processes that do the same.

    Returns when all of them exist.
    """
    while missing:
        made = [_make_block(task, missing, encoder) for task in missing]
        missing = _missing(missing)
        if missing and not any(made):
            time.sleep(_POLL_SECONDS)  # others make the rest, or are killed


def _make_block(task: Task, tasks: Sequence[Task], encoder: Encoder) -> bool:
    """Make a block, unless it exists or another process makes it; whether it did."""
    if task.folder.exists():
        return False
    lock_path = task.folder.with_name(f"{task.folder.name}.lock")
    with _writing(task.folder), lock_path.open("ab") as file:
        is_locked = lock(file.fileno())
        if is_locked is False:
            return False
        # Another process may have made it since.
        is_missing = not task.folder.exists()
        if is_missing:
            _write_block(task, tasks, encoder, is_locked=bool(is_locked))
        # Whoever has opened the file before finds the block when it gets the lock.
        lock_path.unlink(missing_ok=True)
    return is_missing


def _write_block(
    task: Task, tasks: Sequence[Task], encoder: Encoder, *, is_locked: bool
) -> None:
    ignored = set[str]()
    with new_block(task.folder, is_locked=is_locked) as folder:
        writer = BlockWriter(folder, encoder.separator, encoder.tokenizer.vocab_size)
        for encoded in _encode(task, tasks, encoder, ignored):
            writer.add(*encoded)
        writer.finish(ignored)


def _encode(
    task: Task, tasks: Sequence[Task], encoder: Encoder, ignored: set[str]
) -> Iterator[Any]:
    """The documents of one of the tasks."""
    for number, unit in enumerate(task.units, 1):
        unread = unread_records(unit, encoder.config, ignored)
        try:
            yield from encoder.encode_all((read() for read in unread), ignored)
        except BadRecordError as error:
            later = tasks[tasks.index(task) + 1 :]
            units = chain(task.units[number:], *(each.units for each in later))
            others = (unread_records(each, encoder.config, set()) for each in units)
            rest = chain(unread, chain.from_iterable(others))
            got = f"{error.got}{_count_bad(rest, encoder)}"
            raise BadRecordError(error.what, got=got, fix=error.fix) from error


def _count_bad(unread: Iterable[Callable[[], Record]], encoder: Encoder) -> str:
    """How many of the records after a bad one are bad, too, and the first of them."""
    count, bad = 0, list[str]()
    with contextlib.suppress(TesseraError):  # of another kind, or of a whole file
        for read in islice(unread, _LOOK_AHEAD):
            count += 1
            try:
                encoder.encode(read(), set())
            except BadRecordError as error:
                bad.append(error.got.partition(": ")[0].rpartition("/")[2])
    if not bad:
        return ""
    named = "; ".join([*bad[:5], *(["…"] if len(bad) > 5 else [])])
    return f"\n{len(bad):,} of the {count:,} records after it are bad, too: {named}"


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TokenCacheError(
            "the tokens cannot be stored",
            got=f"{error.filename or folder}: {error.strerror or error}",
            fix="make room there, or use another folder: data.cache_dir=<folder>",
        ) from error


# --- worker processes


def _run_workers(missing: Sequence[Task], encoder: Encoder, count: int) -> None:
    """Make blocks in processes of their own.

    Raises:
      TokenCacheError: [T608] a process was killed, or takes too much memory.
      TesseraError: As ``_make_blocks`` would raise it in one process.
    """
    workers = [WorkerProcess(READER_BYTES) for _ in range(count)]
    work = missing, encoder.config, encoder.vocab_size
    try:
        with ThreadPoolExecutor(count) as threads:
            results = [threads.submit(one.call, _work, *work) for one in workers]
            try:
                for result in as_completed(results):
                    result.result()
            finally:
                for worker in workers:
                    worker.process.kill()
    except (WorkerDiedError, MemoryError) as error:
        raise TokenCacheError(
            "a process that makes tokens has died",
            got=f"{error or 'it takes more memory than it may'}; the blocks that were "
            "made are kept",
            fix="start again to make the others; if memory ran out, with fewer "
            "processes: data.num_workers=1",
        ) from error
    except TesseraError:
        # An earlier text may have an error too, which another worker had not reached.
        if count > 1:
            _run_workers(_missing(missing)[:count], encoder, 1)
        raise


def _work(missing: Sequence[Task], config: DataConfig, vocab_size: int) -> None:
    _make_blocks(missing, Encoder(config, vocab_size))
