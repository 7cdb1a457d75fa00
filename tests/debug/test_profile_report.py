# SPDX-License-Identifier: Apache-2.0
"""The figures of a profile: of a program whose collectives and times are known."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tessera.analysis.flops import count
from tessera.analysis.ledger import collectives
from tessera.analysis.measured_times import AxesTime, Measured
from tessera.analysis.memory import Memory
from tessera.analysis.tables import WIDTH
from tessera.debug.profile_report import Profile
from tessera.mesh import Mesh

MEMORY = Memory(arguments=3 << 30, outputs=1 << 30, temporaries=0, aliased=0, code=0)
TP, DP = "replica_groups=[2,4]<=[8]", "replica_groups=[4,2]<=[2,4]T(1,0)"
BOTH = (
    f"  a = f32[1000] all-reduce(x), {TP}",
    f"  ROOT b = f32[2000] all-gather(a), {DP}",
)
MEASURED = Measured(
    executions=3,
    seconds=8e-3,
    compute=4e-3,
    communication={("tp",): AxesTime(2e-3, 1e-3, 1), ("dp",): AxesTime(1e-3, 0, 1)},
    communicating=3e-3,
    hidden=1e-3,
)


def profile(*lines, kind="NVIDIA H200", dtype=jnp.bfloat16, **options):
    mesh = Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])
    header = "HloModule m, num_partitions=8", "ENTRY e {"
    text = "\n".join([*header, "  x = f32[1000] parameter(0)", *lines, "}"])
    square = jax.ShapeDtypeStruct((1000, 1000), dtype)
    program = jax.make_jaxpr(jnp.dot)(square, square)
    graph = SimpleNamespace(device_kind=kind, program=program)
    compiled = SimpleNamespace(
        collectives=collectives(text, mesh),
        memory=MEMORY,
        traced=SimpleNamespace(graph=graph),
    )
    return Profile(compiled, count(program), **options)


def test_computation_is_split_over_devices_and_communication_over_axes():
    found = profile(*BOTH)
    # Two times 1000 cubed, and an eighth of it on each of eight devices.
    assert found.local_flops == 2e9 / 8
    assert found.least_compute == pytest.approx(2e9 / 8 / 989.4e12)
    assert found.least_communication == {
        # Two rounds of latency to reduce among four, and two back.
        ("tp",): pytest.approx(2 * 4000 / (0.8 * 450e9) * 3 / 4 + 4 * 4e-6),
        ("dp",): pytest.approx(8000 / (0.8 * 450e9) * 1 / 2 + 4e-6),
    }


def test_the_peak_is_that_of_the_dtype_of_the_matmuls():
    found = profile(dtype=jnp.float32)
    assert found.least_compute == pytest.approx(2e9 / 8 / 494.7e12)
    assert found.least_communication == {}


def test_what_is_not_measured_is_called_an_estimate():
    text = profile(*BOTH, reason="it is a test").as_text()
    assert [" ".join(line.split()) for line in text.splitlines()[2:9]] == [
        "estimate for NVIDIA H200, per device and execution",
        "part amount at peak",
        "computation 250.00 M FLOPs 0.25 µs",
        "communication over tp 3.91 KiB 16.02 µs",
        "communication over dp 7.81 KiB 4.01 µs",
        "communication is 99 % of both at peak, if nothing overlaps",
        "not measured: it is a test",
    ]


def test_an_unknown_device_gets_amounts_alone():
    text = profile(*BOTH, kind="some device").as_text()
    rows = [line.split() for line in text.splitlines()[4:7]]
    assert [row[-1] for row in rows] == ["?", "?", "?"]


@pytest.mark.parametrize(
    "line",
    [
        "  ROOT a = f32[1000] all-reduce(x), replica_groups=groups of tomorrow",
        f"  ROOT a = f32[1000] all-scramble(x), {TP}",
    ],
)
def test_what_an_unknown_collective_takes_is_unknown(line):
    (known, unknown) = BOTH[0].replace("ROOT ", ""), line
    found = profile(known, unknown)
    row = found.collectives.rows[-1]
    assert row.is_unknown
    assert found.least_communication[row.axes] is None


def test_measured_times_have_rates_and_shares():
    text = profile(*BOTH, measured=MEASURED).as_text()
    table = [" ".join(line.split()) for line in text.splitlines()[2:11]]
    assert table[0] == (
        "measured on NVIDIA H200, per device and execution: mean of 3 executions of "
        "8.00 ms"
    )
    assert table[2].endswith(" 0.25 µs 4.00 ms 50 % 62.50 G FLOP/s")
    # All but one part of four: of what is reduced twice.
    rate = 2 * 4000 * 3 / 4 / 2e-3
    assert table[3].endswith(" 1 2.00 ms 25 % 50 % 2.86 MiB/s")
    assert profile(*BOTH, measured=MEASURED).bandwidth(("tp",)) == rate
    assert profile(*BOTH, measured=MEASURED).bandwidth(("dp",)) == 8000 / 2 / 1e-3
    assert table[5] == "idle 2.00 ms 25 %"
    assert table[6] == "33 % of communication ran while the device computed"
    assert table[8] == ("matmuls reach 0 % of the device's peak over the whole step")


def test_a_report_fits_a_hundred_columns():
    measured = replace(MEASURED, seconds=123.4)
    lines = profile(*BOTH, kind="cpu", measured=measured).as_text().splitlines()
    assert max(map(len, lines)) <= WIDTH
