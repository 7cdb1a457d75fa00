# SPDX-License-Identifier: Apache-2.0
"""This process among the others of its run: from the meeting to the common end.

    with joined(settings…) as here:
        …                                  # JAX sees the devices of all processes

A process that is alone joins nothing: it is watched, and JAX is left as it is.
"""

import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import jax

from tessera import _jax, _jax_processes
from tessera.errors import BackendStartedError, MissingRanksError, TesseraError
from tessera.runtime import exit_codes, facts
from tessera.runtime.accelerators import find_accelerators, share_of
from tessera.runtime.addresses import is_loopback
from tessera.runtime.agreement import Facts, difference_error, differences, listed
from tessera.runtime.cluster import Cluster
from tessera.runtime.rendezvous import meet
from tessera.runtime.status_page import StatusPage
from tessera.runtime.stopping import Stopping
from tessera.runtime.watchdog import Watchdog

_log: Final = logging.getLogger("tessera.runtime")
# Threads of the pool that XLA's CPU devices share; fewer make processes of several
# devices wait for each other for ever.
_CPU_THREADS: Final = 32


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for other ranks, in seconds.

    Attributes:
      rendezvous: At the beginning, and where ranks compare what they compiled.
      heartbeat: Until a process that says nothing is dead.
      shutdown: For the others at the end.
    """

    rendezvous: float = 300.0
    heartbeat: int = 100
    shutdown: int = 300


@dataclass(frozen=True)
class Processes:
    """The processes of the run, seen from this one. ``joined`` makes it.

    Attributes:
      cluster: This one's place.
      timeouts: How long it waits for others.
      watchdog: Watches it.
      shared: What rank 0 shares with the others, the same in every attempt.
      attempt: How often the launcher has started the run before.
      is_launched: Whether this process is one of ``tessera.launch``, which shows its
        rank in front of each line.
      stopping: Hears signals; None where the program does.
    """

    cluster: Cluster
    timeouts: Timeouts
    watchdog: Watchdog
    shared: str = ""
    attempt: int = 0
    is_launched: bool = False
    stopping: Stopping | None = None
    _compared: set[str] = field(default_factory=set)

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.cluster.rank

    @property
    def count(self) -> int:
        """Processes of the run."""
        return self.cluster.world_size

    def goes_on(self) -> bool:
        """Whether to begin what comes next; else to save, and leave.

        All ranks call it in the same places: before each step, and before each other
        thing in which all of them take part. It is true unless ``joined`` was given a
        grace period.
        """
        return self.stopping is None or self.stopping.goes_on()

    def compare(self, section: str, key: str, said: Mapping[str, str]) -> None:
        """See that all ranks say the same, once they are connected.

        Args:
          section: What it is about: ``"step"``. Each is compared once.
          key: A fingerprint of it.
          said: Parts of it by name, to say where fingerprints differ.

        Raises:
          RanksDifferError: [T707] they do not.
          MissingRanksError: [T706] not all ranks come this far in time.
        """
        board = _jax_processes.board()
        if self.count == 1:
            return
        if board is None:
            _log.warning("this JAX lets ranks compare nothing: %s is not", section)
            return
        assert section not in self._compared, f"{section} is compared twice"
        self._compared.add(section)
        keys, texts = f"tessera/{section}/keys", f"tessera/{section}/texts"
        board.put(f"{keys}/{self.rank}", key)
        for name, value in {"fingerprint": key, **said}.items():
            board.put(f"{texts}/{self.rank}/{name}", value)
        everyone = board.wait(f"tessera/{section}", self.timeouts.rendezvous)
        found = {int(rank): value for rank, value in board.texts(keys).items()}
        if not everyone:
            late = [rank for rank in range(self.count) if rank not in found]
            raise MissingRanksError(
                f"not all ranks came as far as to compare their {section}",
                got=f"{listed(late) if late else 'no rank'} did not, within "
                f"{self.timeouts.rendezvous:g} s",
                fix="look at the log of the rank that is missing, or raise "
                "runtime.rendezvous_timeout",
            )
        if len(set(found.values())) > 1:
            detailed: dict[int, dict[str, dict[str, str]]] = {}
            for place, value in board.texts(texts).items():
                rank, _, name = place.partition("/")
                detailed.setdefault(int(rank), {section: {}})[section][name] = value
            raise difference_error(differences(detailed))


@contextmanager
def joined(
    cluster: Cluster,
    said: Facts,
    *,
    shared: str = "",
    platform: str = "auto",
    timeouts: Timeouts | None = None,
    deadlines: Mapping[str, float | None] | None = None,
    grace: float | None = None,
) -> Iterator[Processes]:
    """Join the other processes for the length of a ``with`` block.

    Unless the program handles SIGUSR1 itself, it shows the stacks of all threads where
    there are several processes or a launcher.

    An exception that leaves the block ends a process of several at once: it shows the
    exception and waits for nobody, so that nothing is written after it.

    Args:
      cluster: This process's place, from ``detect``.
      said: What has to be the same on every rank, beside versions, code and devices.
      shared: Of rank 0: what all take from it.
      platform: What the run asks for; ``"cpu"`` takes no accelerator.
      timeouts: How long to wait for others.
      deadlines: Seconds for each kind of phase, as ``Watchdog`` takes them.
      grace: Seconds from SIGTERM to the end of the process, saved or not, of a program
        that asks ``goes_on``; None leaves signals to the program.

    Raises:
      SystemExit: After the block, with code 75 or 130, where ``goes_on`` said no.
      CoordinatorError: [T705] rank 0's address is not known or its ports are busy.
      MissingRanksError: [T706] ranks are missing, or there twice, or count otherwise.
      RanksDifferError: [T707] they are not of one run.
    """
    timeouts = timeouts or Timeouts()
    launched = Launched.find(os.environ)
    watchdog = _watchdog(cluster, deadlines or {}, launched)
    watchdog.start()
    if launched is not None or cluster.coordinator is not None:
        _show_stacks_on_request()
    if launched is not None and cluster.rank == 0:
        shared = launched.first_shared(shared)
    with _stopped(grace, cluster.rank) as stopping:
        try:
            if cluster.coordinator is not None:
                watchdog.enter("rendezvous")
                own = {
                    **said,
                    "versions": facts.versions(),
                    "code": facts.code(),
                    "devices": facts.devices(cluster, platform, os.environ),
                }
                shared = meet(
                    cluster, own, timeout=timeouts.rendezvous, shared=shared, say=_say
                )
                watchdog.enter("startup")
                _connect(cluster, platform, timeouts)
                _use_board(watchdog, stopping, cluster)
            watchdog.enter("startup")
            attempt, is_launched = (
                launched.attempt if launched else 0,
                launched is not None,
            )
            yield Processes(
                *(cluster, timeouts, watchdog, shared, attempt, is_launched, stopping)
            )
            if cluster.coordinator is not None:
                watchdog.enter("shutdown")
                jax.distributed.shutdown()
        except BaseException as error:
            watchdog.fail()
            if cluster.coordinator is None:
                raise
            _end(error)
        finally:
            watchdog.stop()


@contextmanager
def _stopped(grace: float | None, rank: int) -> Iterator[Stopping | None]:
    """Hear signals, where there is a grace period, and end as they ask."""
    if grace is None:
        yield None
        return
    with Stopping(grace, rank=rank) as stopping:
        yield stopping
    if stopping.exit_code is not None:
        raise SystemExit(stopping.exit_code)


@dataclass(frozen=True)
class Launched:
    """What ``tessera.launch`` tells its ranks beside their place.

    Attributes:
      folder: Its own, private and there for all attempts; its page is in it.
      launcher: Its process.
      local_rank: This rank's number on the page.
      attempt: How often it has started the run before.
    """

    folder: Path
    launcher: int
    local_rank: int
    attempt: int

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> "Launched | None":
        """From the environment variables; None in a process of any other parent.

        A program that a rank starts inherits the variables, and is no rank.
        """
        names = ("LAUNCHER", "LOCAL_RANK", "ATTEMPT")
        given = [environ.get(f"TESSERA_{name}", "") for name in names]
        path = environ.get("TESSERA_STATUS")
        if path is None or not all(value.isdecimal() for value in given):
            return None
        launcher, local_rank, attempt = map(int, given)
        if os.getppid() != launcher:
            return None
        return cls(Path(path).parent, launcher, local_rank, attempt)

    def first_shared(self, shared: str) -> str:
        """What rank 0 shares: that of the first attempt, which is kept for the next."""
        kept = self.folder / "shared"
        if self.attempt and kept.exists():
            return kept.read_text(encoding="utf-8")
        kept.write_text(shared, encoding="utf-8")
        return shared


def _watchdog(
    cluster: Cluster,
    deadlines: Mapping[str, float | None],
    launched: Launched | None,
) -> Watchdog:
    if launched is None:
        return Watchdog(deadlines, rank=cluster.rank)
    return Watchdog(
        deadlines,
        rank=cluster.rank,
        page=StatusPage(launched.folder / "status"),
        local_rank=launched.local_rank,
        launcher=launched.launcher,
    )


def _connect(cluster: Cluster, platform: str, timeouts: Timeouts) -> None:
    """Let JAX connect the processes, which have met."""
    if _jax.backend_started():
        raise BackendStartedError(
            "the processes cannot be connected any more",
            got="JAX has started its backend",
            fix="join them before anything that touches a device",
        )
    assert cluster.coordinator is not None
    host, port = cluster.coordinator
    threads = os.environ.get("PJRT_NPROC", "")
    if not threads.isdecimal() or int(threads) < _CPU_THREADS:
        os.environ["PJRT_NPROC"] = str(_CPU_THREADS)
    found = find_accelerators(os.environ) * (platform != "cpu")
    mine = share_of(cluster.local_rank, cluster.local_size, len(found))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # It takes SIGTERM for itself for good, whatever else the program does with it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        cluster.world_size,
        cluster.rank,
        local_device_ids=mine,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeouts.rendezvous), 1),
        heartbeat_timeout_seconds=timeouts.heartbeat,
        shutdown_timeout_seconds=timeouts.shutdown,
        coordinator_bind_address=address if is_loopback(host) else None,
    )


def _show_stacks_on_request() -> None:
    """Let SIGUSR1 show stacks, which would end the process otherwise."""
    stream, number = sys.__stderr__, signal.SIGUSR1
    if stream is not None and signal.getsignal(number) == signal.SIG_DFL:
        faulthandler.register(number, file=stream)


def _use_board(watchdog: Watchdog, stopping: Stopping | None, cluster: Cluster) -> None:
    board, rank = _jax_processes.board(), cluster.rank
    if board is None:
        return
    watchdog.connect(
        lambda said: board.put(f"tessera/phase/{rank}", said),
        lambda: board.texts("tessera/phase"),
    )
    if stopping is not None:
        stopping.connect(board, cluster.world_size)


def _end(error: BaseException) -> None:
    """Show an exception, and end: JAX's own end would wait for the others."""
    code, said = exit_codes.FAILURE, "".join(traceback.format_exception(error))
    if isinstance(error, TesseraError):
        code, said = error.exit_code, f"{error}\n"
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else exit_codes.FAILURE
        said = ""
    elif isinstance(error, KeyboardInterrupt):
        code = exit_codes.INTERRUPTED
    # Nobody may read it any more: that must not keep the process from its end.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.write(said)
        sys.stderr.flush()
    os._exit(code)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
