# SPDX-License-Identifier: Apache-2.0
"""Shows a run on the terminal and writes ``train.log``.

Lines go through Python's logging, logger ``tessera``. On a terminal a progress bar, by
rich, takes the place of those that say how far the run is. What a record has as its
``detail`` is written to the file only, after its message.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from textwrap import fill, indent
from time import monotonic
from traceback import format_exception
from typing import Any, Final, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from tessera.errors import printable

log = logging.getLogger("tessera")

_WIDEST_TABLE: Final = 88


class Console:
    r"""Shows a run, and writes its log while it is open.

    Args:
      log_file: ``train.log``; None writes none, as every process but the first does.
      rank: This process's number. Only number 0 shows more than warnings.
      num_processes: With more than one, each line begins with ``[rank i]``.
      stream: Where to show it; None is standard output.
      terminal: Whether that is a terminal; None finds out.
      width: Columns; None asks the terminal.

    Example:
      >>> import io
      >>> seen = io.StringIO()
      >>> with Console(None, stream=seen, terminal=False) as console:
      ...     console.show_validation(100, {"val_loss": 2.25})
      >>> seen.getvalue().split(" ", 1)[1]
      'validation after step 100: loss 2.2500\n'
    """

    def __init__(
        self,
        log_file: Path | None,
        *,
        rank: int = 0,
        num_processes: int = 1,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        width: int | None = None,
    ) -> None:
        stream = sys.stdout if stream is None else stream
        if isinstance(stream, TextIOWrapper):
            # A sample may hold any character, and the locale of a job may be ASCII.
            stream.reconfigure(errors="backslashreplace")
        self._rich = RichConsole(
            file=stream, force_terminal=terminal, width=width, highlight=False
        )
        usable = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._on_terminal = rank == 0 and usable
        self._is_first = rank == 0
        text = f"[rank {rank}] %(message)s" if num_processes > 1 else "%(message)s"
        seen: logging.Handler = _TerminalHandler(self._rich)
        if not self._on_terminal:
            seen = logging.StreamHandler(stream)
            seen.setFormatter(logging.Formatter(f"%(asctime)s {text}", "%H:%M:%S"))
        if not self._is_first:
            seen.setLevel(logging.WARNING)
        self._handlers: list[logging.Handler] = [seen]
        if log_file is not None:
            layout = logging.Formatter(
                f"%(asctime)s %(levelname)s {text}%(detail)s", "%Y-%m-%d %H:%M:%S"
            )
            kept = logging.FileHandler(
                log_file, encoding="utf-8", errors="backslashreplace"
            )
            kept.setFormatter(layout)
            self._handlers.append(kept)
        for handler in self._handlers:
            handler.addFilter(_escaped)

    def __enter__(self) -> "Console":
        self._before = log.level, log.propagate
        log.setLevel(logging.INFO)
        log.propagate = False
        for handler in self._handlers:
            log.addHandler(handler)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        for handler in self._handlers:
            log.removeHandler(handler)
            if error is not None and isinstance(handler, logging.FileHandler):
                # Whoever catches the error shows it; the file keeps its traceback.
                why = "".join(format_exception(error))
                record = {"levelno": logging.ERROR, "levelname": "ERROR", "msg": why}
                handler.handle(logging.makeLogRecord(record))
            handler.close()
        level, log.propagate = self._before
        log.setLevel(level)  # which also forgets what was enabled meanwhile

    def show_table(
        self, title: str, rows: Sequence[tuple[str, str]], detail: str = ""
    ) -> None:
        """Show what is about to run: model, data, mesh; what was compiled.

        Args:
          title: The line above.
          rows: What it is, and how much.
          detail: More lines, for the file only.
        """
        width = _WIDEST_TABLE
        if self._on_terminal:  # some say that they have no columns
            width = min(max(self._rich.width, 40), width)
        text = table(rows, width - 2)
        self._show(title, text, detail and f"\n{detail}")

    def show_validation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show the first mean over the validation data: the loss, or the reward.

        Args:
          step: After which.
          numbers: As from ``weighted_means``.
        """
        name, mean = next(iter(numbers.items()))
        text = f"validation after step {step}: {name.removeprefix('val_')} {mean:.4f}"
        each = [
            f"{one.removeprefix(f'{name}/')} {own:.4f}"
            for one, own in numbers.items()
            if one.startswith(f"{name}/")
        ]
        self._show(f"{text} ({', '.join(each)})" if each else text)

    def show_sample(self, prompt: str, continuation: str) -> None:
        """Show what the model continues a prompt with."""
        self._show("sample", prompt + continuation)

    def _show(self, title: str, text: str = "", detail: str = "") -> None:
        if self._is_first:
            lines = indent(text.rstrip("\n"), "  ")
            shown = f"{title}\n{lines}" if text else title
            log.info("%s", shown, extra={"detail": detail})

    @contextmanager
    def progress(self, num_steps: int, *, done: int = 0) -> Iterator["Progress"]:
        """A bar that fills as steps are done, on a terminal; log lines anywhere else.

        Args:
          num_steps: Optimizer steps of the whole run.
          done: Those done before, by the run that this one continues.
        """
        if not self._on_terminal:
            yield Progress(num_steps, None)
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
        )
        with RichProgress(*columns, console=self._rich, expand=True) as bar:
            bar.add_task("", total=num_steps, completed=done, status="")
            yield Progress(num_steps, bar)


def table(rows: Sequence[tuple[str, str]], width: int = _WIDEST_TABLE) -> str:
    """Names and values in two columns; long values go on below themselves."""
    wide = max(len(name) for name, _ in rows) + 2
    return "\n".join(
        fill(
            f"{name:{wide}}{value}",
            width,
            subsequent_indent=" " * wide,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, value in rows
    )


def _escaped(record: logging.LogRecord) -> bool:
    """Escape what a terminal would obey: names of files and keys may be anybody's."""
    record.msg, record.args = printable(record.getMessage(), keep="\n\t"), None
    record.detail = printable(getattr(record, "detail", ""), keep="\n\t")
    return True


class Progress:
    """How far a run is; ``Console.progress`` makes it."""

    def __init__(self, num_steps: int, bar: RichProgress | None) -> None:
        self._num_steps, self._bar = num_steps, bar
        self._first: tuple[int, float] | None = None

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_second: float,
        others: Mapping[str, float] | None = None,
        details: Mapping[str, float] | None = None,
    ) -> None:
        """Show the numbers of a step, and log them.

        Args:
          step: Optimizer steps done.
          loss: Nats per token.
          tokens_per_second: Of the whole mesh.
          others: More numbers, for the log line only.
          details: More numbers, for the line in the file only.
        """
        text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s{self._left(step)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, status=text)
        more, detail = (
            "".join(f"  {name} {v:.4g}" for name, v in (numbers or {}).items())
            for numbers in (others, details)
        )
        # A terminal has it as its progress bar.
        extra = {"in_bar": True, "detail": detail}
        log.info("step %d/%d  %s%s", step, self._num_steps, text, more, extra=extra)

    def advance(self, step: int) -> None:
        """Move the bar between two updates; logs nothing."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def _left(self, step: int) -> str:
        """By the pace since the first update, before which a run does other things."""
        now = monotonic()
        if self._first is None:
            self._first = step, now
            return ""
        first_step, first_time = self._first
        pace = (now - first_time) / (step - first_step)
        return f"  {_duration(pace * (self._num_steps - step))} left"


class _TerminalHandler(logging.Handler):
    """Prints log records above the progress bar, but those that it shows."""

    def __init__(self, console: RichConsole) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "in_bar", False):
            style = "yellow" if record.levelno >= logging.WARNING else ""
            self._console.print(Text(self.format(record), style=style))


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds: ``1:02:03`` or ``2:03``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
