# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: CPU seconds of each test, and a limit for those of ``make test``.

Where tests are chosen by ``-m "not full"``, as ``make test`` does, a test that takes
more than ``LIMIT`` fails; with ``slow(reason=...)`` it may take ``SLOW_LIMIT``. What
counts is the CPU time of the test and of the processes that it waited for: unlike wall
time it hardly depends on what else the machine does. The garbage collector's is left
out: what it walks through all tests have left, and it interrupts any of them. What
fixtures of a module or of the session take is counted apart and may be
``SHARED_LIMIT``, because any of their tests can be the first. The limits are for the
JAX of Python 3.11; newer ones take longer to compile for CPUs.
"""

import gc
import random
import resource
import time
from collections.abc import Generator
from typing import Any

import jax
import pytest

LIMIT = 1.5  # seconds
SLOW_LIMIT = 5.0  # seconds, with a reason
SHARED_LIMIT = 20.0  # seconds: of fixtures that several tests share
# What ``reference_seconds`` takes on the processor that the limits are meant for.
REFERENCE = 0.05

FAST = "not full"
ENFORCED = jax.__version_info__[:2] == (0, 10)

_BEGIN = time.monotonic()
_STARTED = pytest.StashKey[float]()
_SHARED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help="skip the tests that would begin later, and say so",
    )


class Collections:
    """CPU seconds of the garbage collector, and of JAX's, which it calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.insert(0, self._begin)
        gc.callbacks.append(self._end)

    def _begin(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._began = time.process_time()

    def _end(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "stop":
            self.seconds += time.process_time() - self._began


_COLLECTIONS = Collections()


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    everything = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return everything - _COLLECTIONS.seconds


def reference_seconds() -> float:
    """CPU seconds to compile a program that nobody has compiled before."""
    start = cpu_seconds()
    number = random.Random(start).random()
    operand = jax.ShapeDtypeStruct((8, 8), "float32")
    jax.jit(lambda x: (x * number @ jax.nn.softmax(x)).sum()).lower(operand).compile()
    return cpu_seconds() - start


def problem(used: float, shared: float, *, slow: bool) -> str | None:
    """Why a test is too slow for ``make test``; or None.

    A slow processor is no problem of the test: the limits grow with the time that a
    reference takes on it now.
    """
    limit = SLOW_LIMIT if slow else LIMIT
    if used <= limit and shared <= SHARED_LIMIT:
        return None
    slowness = max(1.0, reference_seconds() / REFERENCE)
    if used > limit * slowness:
        return (
            f"{used:.1f} CPU seconds; the limit is {limit} ({slowness:.1f} times that "
            "on this processor now): make it faster, or mark it full"
            + ("" if slow else ", or slow(reason=...), whose limit is 5")
        )
    if shared > SHARED_LIMIT * slowness:
        return (
            f"the fixtures of its module took {shared:.1f} CPU seconds; the limit is "
            f"{SHARED_LIMIT}: make them faster, or mark the module full"
        )
    return None


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what lives as long as the session.

    It would walk through all modules and tests again and again: a seventh of the time.
    JAX compiles once before, so that no test pays for the start of its backend.
    """
    reference_seconds()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Count fixtures of several tests apart from the test that asks first."""
    start = cpu_seconds()
    try:
        return (yield)
    finally:
        item = getattr(request, "_pyfuncitem", None)
        if fixturedef.scope != "function" and item is not None:
            item.stash[_SHARED] = item.stash.get(_SHARED, 0.0) + cpu_seconds() - start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Begin to count; skip what begins too late."""
    allowed = item.config.getoption("--stop-after")
    if allowed is not None and time.monotonic() - _BEGIN > allowed:
        pytest.skip(f"left to the nightly run: {allowed:.0f} s are over")
    item.stash[_STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the CPU seconds to the report, and fail a test that took too many."""
    report = yield
    if call.when != "call":
        return report
    shared = item.stash.get(_SHARED, 0.0)
    used = cpu_seconds() - item.stash[_STARTED] - shared
    report.user_properties.append(("cpu_seconds", used + shared))
    if ENFORCED and report.passed and item.config.option.markexpr == FAST:
        slow = item.get_closest_marker("slow") is not None
        if (found := problem(used, shared, slow=slow)) is not None:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: {found}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The ten slowest tests of all workers."""
    seconds = {
        report.nodeid: dict(report.user_properties).get("cpu_seconds", 0.0)
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, [])
        if report.when == "call"
    }
    if len(seconds) < 100:
        return
    total = sum(seconds.values())
    terminalreporter.section(f"{total:.0f} CPU seconds in tests; the ten slowest")
    for nodeid in sorted(seconds, key=seconds.__getitem__, reverse=True)[:10]:
        terminalreporter.line(f"{seconds[nodeid]:6.1f} s {nodeid}")
