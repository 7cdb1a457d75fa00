# SPDX-License-Identifier: Apache-2.0
"""A machine that vanishes closes no connection: two networks whose link is cut."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "small_run.py"
LIMIT = 120.0
# Rank 1 in a network of its own, and a link to that of rank 0, until a line is read.
SCRIPT = """
ip link set lo up
unshare --net sleep 600 & other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do
  sleep 0.05
done
ip link add here type veth peer name there netns $other
ip addr add 10.0.0.1/24 dev here
ip link set here up
there="nsenter --net=/proc/$other/ns/net"
$there ip link set lo up
$there ip addr add 10.0.0.2/24 dev there
$there ip link set there up
RANK=1 $there "$@" > 1 2>&1 & one=$!
RANK=0 "$@" > 0 2>&1 & zero=$!
read -r _
ip link set here down
wait $zero; echo $?
wait $one; echo $?
kill $other
"""


def can_make_networks() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    command = "unshare", "--map-root-user", "--net", "ip", "link", "set", "lo", "up"
    return subprocess.run(command, capture_output=True, timeout=LIMIT).returncode == 0


@pytest.fixture
def ranks(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks that no launcher watches, each on a machine of its own."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "TESSERA_", "SLURM_"))
    }
    where = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    started = subprocess.Popen(
        [
            *("unshare", "--map-root-user", "--net", "sh", "-c", SCRIPT, "sh"),
            *(sys.executable, str(PROGRAM), "fault=vanish"),
        ],
        cwd=tmp_path,
        env={**inherited, **where, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield started
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate(timeout=LIMIT)


@pytest.mark.full
@pytest.mark.skipif(not can_make_networks(), reason="no network namespaces")
def test_both_sides_of_a_link_that_is_cut_end(ranks, tmp_path):
    """JAX alone misses heartbeats after the 600 s that the program sets."""
    said = [tmp_path / "0", tmp_path / "1"]
    until = time.monotonic() + LIMIT
    while not all(one.exists() and "waiting" in one.read_text() for one in said):
        assert time.monotonic() < until, [one.read_text() for one in said]
        time.sleep(0.05)
    cut_at = time.monotonic()
    out, _ = ranks.communicate("cut\n", timeout=LIMIT)
    seconds = time.monotonic() - cut_at
    assert seconds < 60, "keep-alives take four seconds"
    texts = [one.read_text() for one in said]
    assert out.split() == ["143", "143"], texts
    assert "[T715] rank 1 is gone, and rank 0 ends with it" in texts[0]
    assert "[T715] rank 0 is gone, and rank 1 ends with it" in texts[1]
