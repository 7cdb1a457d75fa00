# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's own tests with ``ts.jit`` in place of ``jax.jit``: a plugin of pytest.

    make test-jax JAX_TESTS=.../jax-0.10.2/tests

JAX's files stay as they are. What their modules call as ``jax.jit``, under any of its
names, is Tessera's, and so is what JAX's ``test_util`` calls: ``_CompileAndCheck``
compares a jitted function with the function. The rest of JAX, whose functions are
jitted too, keeps its own. Each test's outcome is written as a line of JSON.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tessera as ts
from tests.jax_tests import adapted_grad
from tests.jax_tests.differences import read_record, write_record
from tests.jax_tests.outcomes import (
    HELPERS,
    Outcome,
    note_expected_errors,
    outcome_of,
)

# Where JAX's modules find what is replaced, and the modules of tests with them.
NAMES = {
    "jit": [("jax", "jit"), ("jax._src.api", "jit"), ("jax._src.pjit", "pjit")],
    "grad": [
        (module, name)
        for module in ("jax", "jax._src.api")
        for name in ("grad", "value_and_grad")
    ],
    "nothing": [],
}


class Replacement:
    """What stands in for JAX's functions in the modules of tests, and who called it."""

    def __init__(self, folder: Path) -> None:
        self._callers = (f"{folder.resolve()}{os.sep}", HELPERS)
        self.is_reached = False

    def install(self, what: str, patch: pytest.MonkeyPatch) -> None:
        """Replace the functions of ``--replace``, for callers in the folder."""
        for module, name in NAMES[what]:
            target = importlib.import_module(module)
            patch.setattr(target, name, self._dispatched(getattr(target, name), name))

    def _dispatched(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(real)
        def dispatched(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(self._callers):
                return real(*args, **kwargs)
            self.is_reached = True
            return replacement(real, *args, **kwargs)

        replacement = {
            "grad": adapted_grad.grad,
            "value_and_grad": adapted_grad.value_and_grad,
        }.get(name, _jit)
        return dispatched


def _jit(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    del real
    return ts.jit(*args, **kwargs)


class Recorder:
    """Writes the outcome of each test."""

    def __init__(self, replacement: Replacement, record: Path | None) -> None:
        self._replacement = replacement
        self._record = record
        self.outcomes: dict[str, Outcome] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._replacement.is_reached = False
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report: Any = yield
        outcome = outcome_of(report, call, self._replacement.is_reached)
        report.user_properties.append(("outcome", outcome.as_json()))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the process that all reports arrive at."""
        found = [value for name, value in report.user_properties if name == "outcome"]
        if found:
            outcome = Outcome.of_json(found[-1])
        elif report.failed:  # the process that ran it ended
            outcome = Outcome("ended", True, str(report.longrepr)[-2000:])
        else:
            return
        earlier = self.outcomes.get(report.nodeid)
        if earlier is None or outcome.worse_than(earlier):
            self.outcomes[report.nodeid] = outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._record is None or hasattr(session.config, "workerinput"):
            return
        write_record(self._record, self.outcomes)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tessera")
    group.addoption("--replace", default="jit", choices=sorted(NAMES))
    group.addoption("--record", type=Path, help="a file for one JSON line a test")
    group.addoption("--failed-in", type=Path, help="run what failed in this record")


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    _simulate_devices(patch)
    note_expected_errors(patch)
    replacement = Replacement(config.rootpath)
    replacement.install(config.getoption("--replace"), patch)
    config.pluginmanager.register(Recorder(replacement, config.getoption("--record")))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    record = config.getoption("--failed-in")
    if record is None:
        return
    failed = {test for test, o in read_record(record).items() if o.differs}
    items[:] = [item for item in items if item.nodeid in failed]


def _simulate_devices(patch: pytest.MonkeyPatch) -> None:
    """Before JAX starts its backend, and as the project's own tests have them."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "device_count" not in flags:
        devices = "--xla_force_host_platform_device_count=8"
        patch.setenv("XLA_FLAGS", f"{flags} {devices}".strip())
    for name, value in {"PJRT_NPROC": "32", "JAX_PLATFORMS": "cpu"}.items():
        patch.setenv(name, os.environ.get(name, value))
