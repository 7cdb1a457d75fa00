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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import jax

from tessera import _jax, _jax_processes
from tessera.errors import BackendStartedError, MissingRanksError, TesseraError
from tessera.runtime import exit_codes, fingerprint
from tessera.runtime.accelerators import find_accelerators, share_of
from tessera.runtime.addresses import address_towards, bind_address, host_and_port
from tessera.runtime.cluster import Cluster
from tessera.runtime.launcher_messages import STATUS, Launched
from tessera.runtime.process_exit import at_end, leave
from tessera.runtime.rank_consistency import (
    Facts,
    difference_error,
    differences,
    listed,
)
from tessera.runtime.rendezvous import meet
from tessera.runtime.status_page import StatusPage
from tessera.runtime.stop_requests import Stopping
from tessera.runtime.watchdog import NO_LAUNCHER, Watchdog

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


class Claim(Protocol):
    """Something that one run alone may have, such as the folder that it writes."""

    def take(self, shared: str, lost: Callable[[TesseraError], None], /) -> None:
        """Take it, or raise a coded error.

        Args:
          shared: What rank 0 shares.
          lost: Ends this process, from any thread, where it is another's later on.
        """

    def release(self) -> None:
        """Give it back; from any thread."""


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
        ranks = {str(rank): rank for rank in range(self.count)}
        said_by = board.texts(keys)
        found = {ranks[rank]: said_by[rank] for rank in said_by.keys() & ranks.keys()}
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
                if rank in ranks:
                    of_rank = detailed.setdefault(ranks[rank], {section: {}})
                    of_rank[section][name] = value
            raise difference_error(differences(detailed))


@contextmanager
def joined(
    cluster: Cluster,
    said: Facts,
    *,
    shared: str = "",
    claim: Claim | None = None,
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
      claim: What rank 0 takes for the length of the block, before the ranks meet; what
        it raises then, all raise.
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
    launched = launched if launched and launched.is_rank else None
    if launched is not None or cluster.coordinator is not None:
        _show_stacks_on_request()
    if launched is not None and cluster.rank == 0:
        shared = launched.first_shared(shared)
    with _stopped(grace, cluster.rank) as stopping:
        try:
            watchdog.enter("claim")
            with _claimed(claim, cluster, shared, watchdog) as refusal:
                if cluster.coordinator is not None:
                    watchdog.enter("rendezvous")
                    own = {
                        **said,
                        "versions": fingerprint.versions(),
                        "code": fingerprint.code(),
                        "devices": fingerprint.devices(cluster, platform, os.environ),
                    }
                    shared = meet(
                        *(cluster, own, refusal),
                        timeout=timeouts.rendezvous,
                        shared=shared,
                        say=_say,
                    )
                    watchdog.enter("startup")
                    _connect(cluster, platform, timeouts)
                    _use_board(watchdog, stopping, cluster)
                watchdog.enter("startup")
                attempt = launched.attempt if launched else 0
                yield Processes(
                    *(cluster, timeouts, watchdog, shared, attempt),
                    *(launched is not None, stopping),
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
        try:
            yield stopping
        finally:
            # What comes after it has its end by then as well: the interpreter's own.
            stopping.keep_deadline()
    if stopping.exit_code is not None:
        raise SystemExit(stopping.exit_code)


def _watchdog(
    cluster: Cluster,
    deadlines: Mapping[str, float | None],
    launched: Launched | None,
) -> Watchdog:
    """Of this process; one that was launched ends where it has no launcher any more."""
    has_launcher = None
    if launched is not None:
        if not launched.has_launcher:
            leave(exit_codes.ENDED, NO_LAUNCHER)
        has_launcher = lambda: launched.has_launcher  # noqa: E731
    if launched is None or not launched.is_rank:
        return Watchdog(deadlines, rank=cluster.rank, has_launcher=has_launcher)
    return Watchdog(
        deadlines,
        rank=cluster.rank,
        page=StatusPage(launched.folder / STATUS),
        local_rank=launched.local_rank,
        has_launcher=has_launcher,
    )


@contextmanager
def _claimed(
    claim: Claim | None, cluster: Cluster, shared: str, watchdog: Watchdog
) -> Iterator[TesseraError | None]:
    """Claim what rank 0 shares; the reason why it could not, for the others to hear."""
    if claim is None or cluster.rank:
        yield None
        return

    def lose(error: TesseraError) -> None:
        watchdog.fail()
        leave(error.exit_code, f"{error}\n")

    with at_end(claim.release):
        try:
            claim.take(shared, lose)
        except TesseraError as error:
            if cluster.coordinator is None:
                raise
            yield error
        else:
            yield None


def _connect(cluster: Cluster, platform: str, timeouts: Timeouts) -> None:
    """Let JAX connect the processes, which have met."""
    if _jax.backend_started():
        raise BackendStartedError(
            "the processes cannot be connected any more",
            got="JAX has started its backend",
            fix="join them before anything that touches a device",
        )
    assert cluster.coordinator is not None
    threads = os.environ.get("PJRT_NPROC", "")
    if not threads.isdecimal() or int(threads) < _CPU_THREADS:
        os.environ["PJRT_NPROC"] = str(_CPU_THREADS)
    found = find_accelerators(os.environ) * (platform != "cpu")
    mine = share_of(cluster.local_rank, cluster.local_size, len(found))
    if own := address_towards(cluster.coordinator):
        _jax_processes.listen_on(own)
    # JAX would listen on all interfaces, unless this variable says which.
    is_chosen = cluster.rank or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ
    where = None if is_chosen else bind_address(cluster.coordinator)
    # It takes SIGTERM for itself for good, whatever else the program does with it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        host_and_port(cluster.coordinator),
        cluster.world_size,
        cluster.rank,
        local_device_ids=mine,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeouts.rendezvous), 1),
        heartbeat_timeout_seconds=timeouts.heartbeat,
        shutdown_timeout_seconds=timeouts.shutdown,
        coordinator_bind_address=host_and_port(where) if where else None,
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
    leave(code, said)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
