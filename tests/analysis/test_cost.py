# SPDX-License-Identifier: Apache-2.0
import pytest

from tessera.analysis.cost import balance
from tessera.analysis.flops import Flops
from tessera.analysis.ledger import collectives
from tessera.analysis.memory import Memory
from tessera.mesh import Mesh

MEMORY = Memory(arguments=3 << 30, outputs=1 << 30, temporaries=0, aliased=0, code=0)
GROUPS = "replica_groups=[2,4]<=[8]"


@pytest.fixture
def mesh():
    return Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])


def ledger(mesh, *lines):
    text = ["HloModule m, num_partitions=8", "ENTRY e {"]
    return collectives(
        "\n".join([*text, "  x = f32[1000] parameter(0)", *lines, "}"]), mesh
    )


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
        # Two rounds of latency to reduce among four, and two back.
        ("tp",): pytest.approx(2 * 4000 / (0.8 * 450e9) * 3 / 4 + 4 * 4e-6),
        ("dp",): pytest.approx(2 * 4000 / (0.8 * 450e9) * 1 / 2 + 2 * 4e-6),
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
        "part                          amount       time\n"
        "matmuls                10.00 G FLOPs   10.11 µs\n"
        "memory                      4.00 GiB  894.78 µs\n"
        "communication over tp       15.3 MiB   41.33 µs\n"
        "communication is 80 % of matmuls and communication\n"
        "every axis is taken to run over the devices' own fast links, "
        "at the rate of large collectives and without overlap"
    )


def test_an_unknown_device_gets_amounts_alone(mesh):
    line = f"  ROOT a = f32[1000] all-reduce(x), {GROUPS}"
    found = balance(ledger(mesh, line), Flops(8 * 10**9), MEMORY, "cpu")
    assert found.communication_share is None
    assert found.as_text() == (
        "estimate for cpu, per device and execution "
        "(its peaks are not known: amounts alone)\n"
        "part                         amount  time\n"
        "matmuls                1.00 G FLOPs     ?\n"
        "memory                     4.00 GiB     ?\n"
        "communication over tp      3.91 KiB     ?"
    )


def test_a_program_that_sends_nothing_only_computes(mesh):
    found = balance(ledger(mesh), Flops(10**9), MEMORY, "NVIDIA H200")
    assert found.communication == {}
    assert found.communication_share == 0.0
