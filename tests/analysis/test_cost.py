# SPDX-License-Identifier: Apache-2.0
import pytest

from tessera.analysis.cost import balance, collective_seconds
from tessera.analysis.device_peaks import Peak
from tessera.analysis.flops import Flops
from tessera.analysis.ledger import collectives
from tessera.analysis.memory import Memory
from tessera.mesh import Mesh

MEMORY = Memory(arguments=3 << 30, outputs=1 << 30, temporaries=0, aliased=0, code=0)
GROUPS = "replica_groups=[2,4]<=[8]"
SWITCH = Peak(bf16=1e12, f32=1e12, memory_bandwidth=1e9, link_bandwidth=1e6)
TORUS = Peak(1e12, 1e12, 1e9, 1e6, is_torus=True)


@pytest.fixture
def mesh():
    return Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])


def ledger(mesh, *lines):
    text = ["HloModule m, num_partitions=8", "ENTRY e {"]
    return collectives(
        "\n".join([*text, "  x = f32[1000] parameter(0)", *lines, "}"]), mesh
    )


@pytest.mark.parametrize(
    ("line", "on_switch", "on_torus"),
    [
        # 4000 bytes at 1e6 bytes/s are 4 ms; groups of four send 3/4 of them.
        (f"f32[1000] all-reduce(x), {GROUPS}", 2 * 3e-3, 2 * 3e-3),
        (f"f32[250] reduce-scatter(x), {GROUPS}", 3e-3, 3e-3),
        (f"f32[4000] all-gather(x), {GROUPS}", 4 * 3e-3, 4 * 3e-3),
        # Around a ring all 16000 bytes of the group take V / 4 W.
        (f"f32[1000] all-to-all(x), {GROUPS}", 3e-3, 4e-3),
        # A permute goes one way, and a ring's bandwidth is of both.
        ("f32[1000] collective-permute(x), source_target_pairs={{0,1}}", 4e-3, 8e-3),
    ],
)
def test_seconds_of_each_collective(mesh, line, on_switch, on_torus):
    (row,) = ledger(mesh, f"  ROOT r = {line}").rows
    assert collective_seconds(row, SWITCH) == pytest.approx(on_switch)
    assert collective_seconds(row, TORUS) == pytest.approx(on_torus)


def test_the_balance_splits_compute_over_devices_and_communication_over_axes(mesh):
    collected = ledger(
        mesh,
        f"  a = f32[1000] all-reduce(x), {GROUPS}",
        "  ROOT b = f32[1000] all-reduce(a), replica_groups=[4,2]<=[2,4]T(1,0)",
    )
    found = balance(collected, Flops(matmul=8 * 10**12), MEMORY, "NVIDIA H200")
    assert found.flops == 10**12
    assert found.compute == pytest.approx(1e12 / 989.4e12)
    assert found.memory == pytest.approx((4 << 30) / 4.8e12)
    assert found.communication == {
        ("tp",): pytest.approx(2 * 4000 / 450e9 * 3 / 4),
        ("dp",): pytest.approx(2 * 4000 / 450e9 * 1 / 2),
    }
    sent = sum(found.communication.values())
    assert found.communication_share == pytest.approx(sent / (sent + found.compute))
    in_f32 = balance(collected, Flops(8 * 10**12), MEMORY, "NVIDIA H200", "float32")
    assert in_f32.compute == pytest.approx(1e12 / 494.7e12)


def test_the_text_says_that_it_is_an_estimate(mesh):
    line = f"  ROOT a = f32[4000000] all-gather(x), {GROUPS}"
    text = balance(
        ledger(mesh, line), Flops(8 * 10**10), MEMORY, "NVIDIA H200"
    ).as_text()
    assert text == (
        "estimate for NVIDIA H200, per device and execution\n"
        "part                          amount    at best\n"
        "matmuls                10.00 G FLOPs   10.11 µs\n"
        "memory                      4.00 GiB  894.78 µs\n"
        "communication over tp       15.3 MiB   26.67 µs\n"
        "communication is 73 % of matmuls and communication\n"
        "every axis is taken to run over the devices' own fast links, "
        "at full rate and without overlap"
    )


def test_an_unknown_device_gets_amounts_alone(mesh):
    line = f"  ROOT a = f32[1000] all-reduce(x), {GROUPS}"
    found = balance(ledger(mesh, line), Flops(8 * 10**9), MEMORY, "cpu")
    assert found.communication_share is None
    assert found.as_text() == (
        "estimate for cpu, per device and execution "
        "(its peaks are not known: amounts alone)\n"
        "part                         amount  at best\n"
        "matmuls                1.00 G FLOPs        ?\n"
        "memory                     4.00 GiB        ?\n"
        "communication over tp      3.91 KiB        ?"
    )


def test_a_program_that_sends_nothing_only_computes(mesh):
    found = balance(ledger(mesh), Flops(10**9), MEMORY, "NVIDIA H200")
    assert found.communication == {}
    assert found.communication_share == 0.0
