# SPDX-License-Identifier: Apache-2.0
"""``training.profile_communication``: profiles the communication of a few steps.

The steps are chosen as ``torch.profiler.schedule`` does: ``wait`` of them are let pass,
``warmup`` are traced and forgotten, for a profiler's first steps are slow, and
``active`` are measured. Their trace stays in the run's folder.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from tessera.debug.profile_report import Profile, of_program
from tessera.errors import OutputPathError
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import log
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import RunFolder


def write_profile(folder: Path, profile: Profile) -> None:
    """Write ``communication.txt``.

    Raises:
      OutputPathError: [T504] the folder cannot be written.
    """
    try:
        folder.mkdir(exist_ok=True)  # and not the run's, should that be gone
        (folder / "communication.txt").write_text(profile.as_text() + "\n")
    except OSError as error:
        raise OutputPathError(
            "the profile cannot be written",
            got=f"{folder}: {error.strerror}",
            fix="make room there, or set training.profile_communication=false",
        ) from error


class Window:
    """Measures a few steps of a run, and writes what they were.

    Args:
      folder: Where the trace and the report go.
      report: Gives what can be said of the step without a trace.
      wait: Steps of this process to let pass.
      warmup: Steps to trace and forget.
      active: Steps to measure; fewer where the run ends before.
      write: Gets the last of these steps and the seconds of communication.
    """

    def __init__(
        self,
        folder: Path,
        report: Callable[[], Profile],
        *,
        wait: int,
        warmup: int,
        active: int,
        write: Callable[[int, Mapping[str, float]], None] = lambda step, numbers: None,
    ) -> None:
        self._folder, self._report, self._write = folder, report, write
        self._wait, self._begin = wait, wait + warmup
        self._end = wait + warmup + active
        self._steps = self._last = 0
        self._is_done = False
        self._trace = ExitStack()
        self._mark = ExitStack()

    @classmethod
    def of(
        cls, run: Run, folder: RunFolder | None, writer: MetricWriter
    ) -> "Window | None":
        """That of a run which asks for one, in the process that has a folder."""
        training = run.config.training
        if folder is None or not training.profile_communication:
            return None
        return cls(
            folder.profile,
            lambda: of_program(run.compiled),
            wait=training.profile_wait,
            warmup=training.profile_warmup,
            active=training.profile_active,
            write=writer.write,
        )

    def before(self, step: int, drain: Callable[[], None]) -> None:
        """Begin or end what the schedule says where ``step`` is next.

        Args:
          step: The step that is about to start.
          drain: Waits for the steps in flight, which belong to the other side.

        Raises:
          OutputPathError: [T504] the report cannot be written.
        """
        self._mark.close()
        if self._steps == self._end:
            drain()
            self.close()
        elif self._steps == self._begin:
            drain()
            self._trace.close()
            self._trace.enter_context(_traced(self._folder, keep=True))
        elif self._steps == self._wait:
            drain()
            forgotten = self._trace.enter_context(TemporaryDirectory())
            self._trace.enter_context(_traced(Path(forgotten), keep=False))
        if self._wait <= self._steps < self._end:
            mark = jax.profiler.StepTraceAnnotation("step", step_num=step)
            self._mark.enter_context(mark)
        self._steps += 1
        self._last = step

    def close(self) -> None:
        """End the trace, if it runs, and write the report of its steps.

        Raises:
          OutputPathError: [T504] the report cannot be written.
        """
        self._mark.close()
        self._trace.close()
        measured = min(self._steps, self._end) - self._begin
        if self._is_done or self._steps == 0:
            return
        self._is_done = True
        if measured < 1:
            log.warning(
                "nothing was profiled: the run had %d steps and lets the first %d pass",
                self._steps,
                self._begin,
            )
            return
        report = self._report().from_trace(self._folder, measured)
        write_profile(self._folder, report)
        if report.measured is not None:
            times = report.measured.communication.items()
            # A character that all trackers take in a name.
            names = {"-".join(axes): spent.seconds for axes, spent in times}
            numbers = {f"communication_seconds/{n}": s for n, s in names.items()}
            self._write(self._last, numbers)
        log.info("%s", report.as_text())
        log.info(
            "the trace is in %s: xprof and TensorBoard open the folder, Perfetto the "
            "file perfetto_trace.json.gz",
            self._folder,
        )


@contextmanager
def _traced(folder: Path, *, keep: bool) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what is measured
    jax.profiler.start_trace(
        str(folder), create_perfetto_trace=keep, profiler_options=options
    )
    try:
        yield
    finally:
        if folder.parent.is_dir():  # it would be made anew
            jax.profiler.stop_trace()
