# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: how long each test takes, and a limit for those of ``make test``.

``durations.json`` has the CPU seconds of every test above half a second, including its
subprocesses, as ``make durations`` measured them. CPU time, unlike wall time, hardly
depends on what else the machine does.
"""

import json
import resource
from collections.abc import Generator
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("durations.json")
SHORTEST = 0.5  # seconds: what the table leaves out
LIMIT = 5.0  # seconds: for a test without the marker ``full``

_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write the CPU seconds of the tests that run to {TABLE.name}",
    )


def _cpu_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Begin to count: fixtures belong to the first test that needs them."""
    item.stash[_STARTED] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Attach the CPU seconds of the test and its fixtures to its report."""
    try:
        return (yield)
    finally:
        used = _cpu_seconds() - item.stash[_STARTED]
        item.user_properties.append(("cpu_seconds", used))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that is too slow for ``make test`` and not marked ``full``.

    Raises:
      UsageError: The table has more than ``LIMIT`` seconds for it.
    """
    seconds = json.loads(TABLE.read_text())
    slow = [
        f"{item.nodeid}: {seconds[item.nodeid]:.1f} s"
        for item in items
        if seconds.get(item.nodeid, 0) > LIMIT and not item.get_closest_marker("full")
    ]
    if slow:
        raise pytest.UsageError(
            f"tests above {LIMIT:.0f} s: mark them full, or make them faster and run "
            "make durations\n  " + "\n  ".join(slow)
        )


class _Recorder:
    """Collects the reports of all workers and writes the table at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seconds[report.nodeid] = dict(report.user_properties)["cpu_seconds"]

    def pytest_sessionfinish(self) -> None:
        before = json.loads(TABLE.read_text())
        table = {**before, **self.seconds}
        kept = {name: round(s, 1) for name, s in sorted(table.items()) if s > SHORTEST}
        TABLE.write_text(json.dumps(kept, indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--record-durations") and not is_worker:
        config.pluginmanager.register(_Recorder())
