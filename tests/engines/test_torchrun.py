# SPDX-License-Identifier: Apache-2.0
"""Real torchrun with c10d rendezvous: agents come and go, and the curve stays."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessera.train.runtime.launcher import free_port
from tests.engines.conftest import (
    ENGINES,
    LIMIT,
    STEPS,
    command,
    curve,
    environment,
    kill,
    num_lines,
    wait_for,
)

Agents = Callable[[int], subprocess.Popen[bytes]]


@pytest.fixture
def start_agent(tmp_path: Path, cache: Path) -> Iterator[Agents]:
    """Starts agents of one process each; the first one has the rendezvous' store."""
    port, agents = free_port(), list[subprocess.Popen[bytes]]()

    def start(number: int) -> subprocess.Popen[bytes]:
        settings = {
            "is_host": str(number == 0).lower(),
            "join_timeout": 120,
            "last_call_timeout": 3,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 3,
        }
        conf = ",".join(f"{name}={value}" for name, value in settings.items())
        with (tmp_path / f"agent{number}.log").open("ab") as log:
            agent = subprocess.Popen(
                [
                    *(f"{ENGINES}/torchrun", "--no-python", "--nnodes=1:3"),
                    *("--nproc-per-node=1", "--max-restarts=5", "--rdzv-id=run"),
                    *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
                    *(f"--rdzv-conf={conf}", "--monitor-interval=0.2"),
                    *command(tmp_path / "run", cache),
                ],
                # With a shared store, torch's agents do not tell a new one its address.
                env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        kill(agent)


def test_a_run_goes_on_with_the_agents_that_are_left_and_those_that_come_back(
    tmp_path, start_agent, undisturbed
):
    log = tmp_path / "agent0.log"

    def learned(steps: int) -> bool:
        return num_lines(tmp_path / "run") >= steps

    def has_world(size: int) -> bool:
        return f"rank 0 of {size}," in every_log()

    def every_log() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("agent*.log"))

    first = start_agent(0)
    _, third = start_agent(1), start_agent(2)
    wait_for(lambda: has_world(3) and learned(15), log)
    kill(third)
    wait_for(lambda: has_world(2) and learned(45), log)
    start_agent(2)
    assert first.wait(LIMIT) == 0, log.read_text()[-5000:]
    assert every_log().count("rank 0 of 3,") >= 2
    assert curve(tmp_path / "run") == undisturbed
    assert len(undisturbed) == STEPS + 3
