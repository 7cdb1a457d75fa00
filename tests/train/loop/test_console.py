# SPDX-License-Identifier: Apache-2.0
"""What is seen on a terminal, what is seen elsewhere, and what the log keeps."""

import io
import logging
import re

import pytest

from tessera.train.loop import console as console_module
from tessera.train.loop.console import Console

ROWS = [("mesh", "fsdp mesh, 4"), ("settings", "training.steps=100 " * 9)]


def plain(text):
    """Text without colors and without the time at the beginning of lines."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return re.sub(r"^(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d ", "", text, flags=re.MULTILINE)


def run(show, *, terminal, tmp_path=None, **kwargs):
    """What is seen, and the lines of the log."""
    stream = io.StringIO()
    path = tmp_path / "train.log" if tmp_path else None
    with Console(path, stream=stream, terminal=terminal, width=80, **kwargs) as console:
        show(console)
    return plain(stream.getvalue()), plain(path.read_text()) if path else ""


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [0.0]
    monkeypatch.setattr(console_module, "monotonic", lambda: now[0])
    return now


def train(clock, steps=4):
    def show(console):
        with console.progress(steps) as progress:
            for step in range(1, steps + 1):
                clock[0] += 30.0
                progress.advance(step)
                progress.update(
                    step,
                    loss=8 / step,
                    tokens_per_second=12345.6,
                    others={"grad_norm": 0.51239},
                    details={"step_seconds": 30.0},
                )

    return show


def test_elsewhere_a_step_is_a_plain_line_and_the_file_has_more_numbers(
    tmp_path, clock
):
    seen, logged = run(train(clock), terminal=False, tmp_path=tmp_path)
    assert seen == (
        "step 1/4  loss 8.0000  12,346 tokens/s  grad_norm 0.5124\n"
        "step 2/4  loss 4.0000  12,346 tokens/s  1:00 left  grad_norm 0.5124\n"
        "step 3/4  loss 2.6667  12,346 tokens/s  0:30 left  grad_norm 0.5124\n"
        "step 4/4  loss 2.0000  12,346 tokens/s  0:00 left  grad_norm 0.5124\n"
    )
    assert logged == "".join(
        f"INFO {line}  step_seconds 30\n" for line in seen.splitlines()
    )


def test_time_left_follows_the_pace_after_the_first_update(clock):
    def show(console):
        with console.progress(7400) as progress:
            for step, seconds in ((1, 100), (2, 1), (3, 1)):
                clock[0] += seconds
                progress.update(step, loss=1.0, tokens_per_second=1.0)

    lines, _ = run(show, terminal=False)
    assert [line.split("  ")[-1] for line in lines.splitlines()] == [
        "1 tokens/s",
        "2:03:18 left",
        "2:03:17 left",
    ]


def test_on_a_terminal_there_is_a_bar_and_the_log_has_the_lines(tmp_path, clock):
    seen, logged = run(train(clock), terminal=True, tmp_path=tmp_path)
    last = seen.rstrip("\n").split("\r")[-1].splitlines()[-1]
    assert last.startswith("step 4/4 ━━")
    assert last.endswith("loss 2.0000  12,346 tokens/s  0:00 left")
    assert len(last) == 80
    assert logged.count("INFO step ") == 4
    assert "grad_norm" not in seen


# How many settings are in a line: a terminal has 80 columns.
@pytest.mark.parametrize(
    ("terminal", "counts"), [(True, [3, 3, 3]), (False, [4, 4, 1])]
)
def test_a_table_is_aligned_and_the_file_alone_has_its_details(
    tmp_path, terminal, counts
):
    seen, logged = run(
        lambda c: c.show_table("run", ROWS, "name: tiny\n\x1b[2J"),
        terminal=terminal,
        tmp_path=tmp_path,
    )
    lines = [" ".join(n * ["training.steps=100"]) for n in counts]
    below = "\n            ".join(lines)
    assert seen == f"run\n  mesh      fsdp mesh, 4\n  settings  {below}\n"
    assert logged == f"INFO {seen}name: tiny\n\\x1b[2J\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_validation_is_one_line(terminal):
    seen, _ = run(
        lambda c: c.show_validation(100, {"val_loss": 2.25}), terminal=terminal
    )
    assert seen == "validation after step 100: loss 2.2500\n"
    each = {"val_loss": 2.25, "val_loss/web": 2.5, "val_loss/books": 1.5}
    seen, _ = run(lambda c: c.show_validation(100, each), terminal=terminal)
    assert seen == (
        "validation after step 100: loss 2.2500 (web 2.5000, books 1.5000)\n"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sample_cannot_command_the_terminal(tmp_path, terminal):
    sample = "foo[red]:\n\treturn '\x1b[2J\x07\u202e\udcff'"
    seen, logged = run(
        lambda c: c.show_sample("def ", sample), terminal=terminal, tmp_path=tmp_path
    )
    for text in (seen, logged):
        assert "def foo[red]:" in text
        assert r"return '\x1b[2J\x07\u202e\udcff'" in text
    assert logged.startswith("INFO sample\n  def foo[red]:\n  \treturn")


@pytest.mark.parametrize("terminal", [True, False])
def test_log_records_of_the_package_are_shown_and_kept(tmp_path, terminal):
    def show(console):
        logging.getLogger("tessera.graph").info("simulating %d devices", 4)
        logging.getLogger("tessera").warning("[bold]odd[/bold]")
        logging.getLogger("tessera").debug("never")

    seen, logged = run(show, terminal=terminal, tmp_path=tmp_path)
    assert seen == "simulating 4 devices\n[bold]odd[/bold]\n"
    assert logged == "INFO simulating 4 devices\nWARNING [bold]odd[/bold]\n"


def test_lines_have_a_rank_when_there_are_several_processes(tmp_path):
    seen, logged = run(
        lambda c: c.show_validation(1, {"val_loss": 2.0}),
        terminal=False,
        tmp_path=tmp_path,
        num_processes=2,
    )
    assert seen == "[rank 0] validation after step 1: loss 2.0000\n"
    assert logged == "INFO [rank 0] validation after step 1: loss 2.0000\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_other_processes_show_their_warnings_only(clock, terminal):
    def show(console):
        console.show_table("run", ROWS)
        train(clock)(console)
        console.show_validation(1, {"val_loss": 2.0})
        console.show_sample("a", "b")
        logging.getLogger("tessera").info("ready")
        logging.getLogger("tessera").warning("slow")

    seen, _ = run(show, terminal=terminal, rank=1, num_processes=2)
    assert seen == "[rank 1] slow\n"


def test_the_file_keeps_the_traceback_of_what_stopped_the_run(tmp_path):
    def fail(console):
        raise ZeroDivisionError("in step 7")

    with pytest.raises(ZeroDivisionError):
        run(fail, terminal=False, tmp_path=tmp_path)
    logged = plain((tmp_path / "train.log").read_text())
    assert logged.startswith("ERROR Traceback (most recent call last):\n")
    assert logged.endswith("ZeroDivisionError: in step 7\n\n")


def test_closing_leaves_logging_as_it_was():
    logger = logging.getLogger("tessera")
    before = (logger.level, logger.propagate, list(logger.handlers))
    run(lambda c: None, terminal=False)
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_a_stream_that_knows_ascii_only_shows_codes():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Console(None, stream=stream, terminal=False) as console:
        console.show_table("run", [("mesh", "fsdp × tp mesh, 4 × 1")])
    stream.flush()
    assert rb"mesh  fsdp \xd7 tp mesh, 4 \xd7 1" in raw.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch, clock):
    monkeypatch.setenv("TERM", "dumb")
    seen, _ = run(train(clock, steps=1), terminal=True)
    assert seen.startswith("step 1/1  loss 8.0000")
