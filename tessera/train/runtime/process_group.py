# SPDX-License-Identifier: Apache-2.0
"""Joins this process with the others of its run, from the rendezvous to the exit.

    with joined(cluster, fingerprint) as here:
        …                                  # JAX sees the devices of all processes

A process that is alone joins nothing: it gets a watchdog, and JAX stays as it is.
"""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import jax

from tessera.errors import BackendStartedError, TesseraError
from tessera.jax_compat import jaxprs, processes
from tessera.train.runtime import exit_codes
from tessera.train.runtime.accelerators import assign_devices, find_accelerators
from tessera.train.runtime.addresses import address_towards, bind_address, host_and_port
from tessera.train.runtime.cluster import Cluster
from tessera.train.runtime.launcher_protocol import ParentLauncher
from tessera.train.runtime.liveness import Liveness
from tessera.train.runtime.process_exit import exit_now, on_exit
from tessera.train.runtime.rank_consistency import (
    Fingerprint,
    code_fingerprint,
    device_fingerprint,
    version_fingerprint,
)
from tessera.train.runtime.rendezvous import rendezvous
from tessera.train.runtime.stop_requests import StopRequests
from tessera.train.runtime.watchdog import Watchdog

# The pool that XLA's CPU devices share; with fewer threads, processes of several
# devices deadlock.
_CPU_THREADS: Final = 32


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for other ranks, in seconds.

    Attributes:
      rendezvous: At the start, and when ranks compare what they compiled.
      heartbeat: Until a silent process counts as dead.
      shutdown: For the others at the end.
    """

    rendezvous: float = 300.0
    heartbeat: int = 100
    shutdown: int = 300


class Claim(Protocol):
    """Something that only one run may have, such as the folder that it writes."""

    def take(self, shared: str, /) -> None:
        """Take what rank 0 shares, or raise a coded error."""

    def release(self) -> None:
        """Release it; from any thread."""


@dataclass(frozen=True)
class Processes:
    """The processes of the run, seen from this one. ``joined`` makes it.

    Attributes:
      cluster: This process among them.
      timeouts: How long it waits for others.
      watchdog: Watches it.
      shared: What rank 0 shares with the others, the same in every attempt.
      attempt: Number of earlier attempts of the launcher.
      is_launched: Whether ``tessera launch`` started this process; it shows the rank in
        front of each line.
      stop_requests: Handles signals; None if the program does.
    """

    cluster: Cluster
    timeouts: Timeouts
    watchdog: Watchdog
    shared: str = ""
    attempt: int = 0
    is_launched: bool = False
    stop_requests: StopRequests | None = None

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.cluster.rank

    @property
    def count(self) -> int:
        """Processes of the run."""
        return self.cluster.world_size

    def should_continue(self) -> bool:
        """Whether to begin the next step; if not, save and exit.

        Every rank calls it at the same points of the program: before each step, and
        before anything else in which all ranks take part. Always true unless ``joined``
        was given a grace period.
        """
        return self.stop_requests is None or self.stop_requests.should_continue()

    def is_stopped(self) -> bool:
        """Whether ``should_continue`` has said no."""
        requests = self.stop_requests
        return requests is not None and requests.exit_code is not None

    def request_stop(self, cause: str) -> None:
        """Have all ranks stop as after SIGTERM; from any thread.

        Args:
          cause: Why, for the log.
        """
        if self.stop_requests is not None:
            self.stop_requests.request(cause)

    def compare(self, section: str, key: str, details: Mapping[str, str]) -> None:
        """Check that all connected ranks pass the same key.

        Args:
          section: What it is about: ``"step"``.
          key: A fingerprint.
          details: Entries by name that show where fingerprints differ.

        Raises:
          RanksDifferError: [T707] they do not.
          MissingRanksError: [T706] not all ranks call this in time.
        """
        if self.count > 1:
            _, peers = rendezvous(
                self.cluster,
                {section: {"fingerprint": key, **details}},
                topic=section,
                timeout=self.timeouts.rendezvous,
                report=_write_line,
            )
            for connection in peers.values():
                connection.close()


@contextmanager
def joined(
    cluster: Cluster,
    fingerprint: Fingerprint,
    *,
    shared: str = "",
    claim: Claim | None = None,
    platform: str = "auto",
    timeouts: Timeouts | None = None,
    deadlines: Mapping[str, float | None] | None = None,
    grace: float | None = None,
) -> Iterator[Processes]:
    """Join the other processes for the length of a ``with`` block.

    If there are several processes or a launcher, SIGUSR1 shows the stacks of all
    threads, unless the program handles it itself.

    An exception that leaves the block ends a process of several at once: it shows the
    exception and waits for no other rank, so that nothing is written after it.

    Args:
      cluster: This process, from ``detect``.
      fingerprint: What has to be the same on every rank, beside versions, code and
        devices.
      shared: On rank 0: what all ranks receive.
      claim: What rank 0 takes for the length of the block, before the rendezvous; an
        error of it is raised on all ranks.
      platform: The platform of the run; ``"cpu"`` uses no accelerator.
      timeouts: How long to wait for others.
      deadlines: Seconds for each kind of phase, as ``Watchdog`` takes them.
      grace: Seconds from SIGTERM to the end of the process, saved or not, for a program
        that calls ``should_continue``; None leaves signals to the program.

    Raises:
      SystemExit: After the block, with code 75 or 130, if ``should_continue`` returned
        False.
      CoordinatorError: [T705] rank 0's address is not known or its ports are busy.
      MissingRanksError: [T706] ranks are missing, duplicated, or of another run.
      RanksDifferError: [T707] their fingerprints differ.
    """
    timeouts = timeouts or Timeouts()
    launcher = ParentLauncher.find(os.environ)
    watchdog = Watchdog(deadlines or {}, rank=cluster.rank, launcher=launcher)
    watchdog.start()
    launcher = launcher if launcher and launcher.is_rank else None
    liveness: Liveness | None = None
    if launcher is not None or cluster.coordinator is not None:
        _show_stacks_on_sigusr1()
    if launcher is not None and cluster.rank == 0:
        shared = launcher.shared_of_first_attempt(shared)
    with (
        _handle_stop_signals(grace, cluster.rank) as stop_requests,
        ExitStack() as callbacks,
    ):
        try:
            watchdog.enter("claim")
            with _claimed(claim, cluster, shared) as refusal:
                if cluster.coordinator is not None:
                    watchdog.enter("rendezvous")
                    shared, peers = rendezvous(
                        cluster,
                        _whole_fingerprint(fingerprint, cluster, platform),
                        refusal,
                        timeout=timeouts.rendezvous,
                        shared=shared,
                        report=_write_line,
                    )
                    watchdog.enter("startup")
                    liveness = Liveness(cluster.rank, peers, stop_requests)
                    liveness.start()
                    callbacks.enter_context(on_exit(liveness.fail))
                    _connect(cluster, platform, timeouts)
                    _share_board(watchdog, stop_requests, cluster)
                watchdog.enter("startup")
                attempt = launcher.attempt if launcher else 0
                yield Processes(
                    cluster,
                    timeouts,
                    watchdog,
                    shared,
                    attempt,
                    is_launched=launcher is not None,
                    stop_requests=stop_requests,
                )
            if stop_requests is not None:
                stop_requests.mark_saved()
            if cluster.coordinator is not None:
                watchdog.enter("shutdown")
                if liveness is not None:
                    liveness.leave()
                jax.distributed.shutdown()
        except BaseException as error:
            watchdog.fail()
            if cluster.coordinator is None:
                raise
            explains_itself = isinstance(
                error, (TesseraError, SystemExit, KeyboardInterrupt)
            )
            if liveness is not None and not explains_itself:
                liveness.wait_for_loss()
            _exit_with(error)
        finally:
            watchdog.stop()


def _whole_fingerprint(
    fingerprint: Fingerprint, cluster: Cluster, platform: str
) -> Fingerprint:
    return {
        **fingerprint,
        "versions": version_fingerprint(),
        "code": code_fingerprint(),
        "devices": device_fingerprint(cluster, platform, os.environ),
    }


@contextmanager
def _handle_stop_signals(
    grace: float | None, rank: int
) -> Iterator[StopRequests | None]:
    """Handle signals if there is a grace period, and exit as they request."""
    if grace is None:
        yield None
        return
    with StopRequests(grace, rank=rank) as stop_requests:
        try:
            yield stop_requests
        finally:
            # It also limits what comes after: the interpreter's own shutdown.
            stop_requests.keep_deadline()
    if stop_requests.exit_code is not None:
        raise SystemExit(stop_requests.exit_code)


@contextmanager
def _claimed(
    claim: Claim | None, cluster: Cluster, shared: str
) -> Iterator[TesseraError | None]:
    """Claim what rank 0 shares; yields the error to raise on all ranks, or None."""
    if claim is None or cluster.rank:
        yield None
        return

    with on_exit(claim.release):
        try:
            claim.take(shared)
        except TesseraError as error:
            if cluster.coordinator is None:
                raise
            yield error
        else:
            yield None


def _connect(cluster: Cluster, platform: str, timeouts: Timeouts) -> None:
    """Let JAX connect the processes, after their rendezvous."""
    if jaxprs.backend_started():
        raise BackendStartedError(
            "the processes cannot be connected any more",
            got="JAX has started its backend",
            fix="join them before anything that touches a device",
        )
    assert cluster.coordinator is not None
    threads = os.environ.get("PJRT_NPROC", "")
    if not threads.isdecimal() or int(threads) < _CPU_THREADS:
        os.environ["PJRT_NPROC"] = str(_CPU_THREADS)
    num_devices = 0 if platform == "cpu" else len(find_accelerators(os.environ))
    if own := address_towards(cluster.coordinator):
        processes.listen_on(own)
    # JAX would listen on all interfaces, unless this variable names one.
    is_chosen = cluster.rank or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ
    bound = None if is_chosen else bind_address(cluster.coordinator)
    # The service would take over SIGTERM for good, whatever else handles it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        host_and_port(cluster.coordinator),
        cluster.world_size,
        cluster.rank,
        local_device_ids=assign_devices(
            cluster.local_rank, cluster.local_size, num_devices
        ),
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeouts.rendezvous), 1),
        heartbeat_timeout_seconds=timeouts.heartbeat,
        shutdown_timeout_seconds=timeouts.shutdown,
        coordinator_bind_address=host_and_port(bound) if bound else None,
    )


def _show_stacks_on_sigusr1() -> None:
    """Let SIGUSR1 show stacks; by default it would end the process."""
    stream, number = sys.__stderr__, signal.SIGUSR1
    if stream is not None and signal.getsignal(number) == signal.SIG_DFL:
        faulthandler.register(number, file=stream)


def _share_board(
    watchdog: Watchdog, stop_requests: StopRequests | None, cluster: Cluster
) -> None:
    """Connect the watchdog and the stop requests with those of the other ranks."""
    board, rank = processes.board(), cluster.rank
    if board is None:
        return
    watchdog.connect(
        lambda phase: board.put(f"tessera/phase/{rank}", phase),
        lambda: board.texts("tessera/phase"),
    )
    if stop_requests is not None:
        stop_requests.connect(board, cluster.world_size)


def _exit_with(error: BaseException) -> None:
    """Show an exception and exit: JAX's own shutdown would wait for the others."""
    code, text = exit_codes.FAILURE, "".join(traceback.format_exception(error))
    if isinstance(error, TesseraError):
        code, text = error.exit_code, f"{error}\n"
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else exit_codes.FAILURE
        text = ""
    elif isinstance(error, KeyboardInterrupt):
        code = exit_codes.INTERRUPTED
    exit_now(code, text)


def _write_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
