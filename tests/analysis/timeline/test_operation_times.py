# SPDX-License-Identifier: Apache-2.0
"""Operations take the compiler's cycles, or the longer of their FLOPs and bytes."""

import dataclasses

import pytest

from tessera.analysis.hlo import parse
from tessera.analysis.timeline.operation_times import operation_time, roofline
from tessera.analysis.timeline.operation_work import Work
from tests.analysis.timeline.round_targets import GPU, TPU

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"3000"}}'


def time_of(line, target):
    module = parse(
        f"HloModule m\nENTRY e {{\n  x = f32[250] parameter(0)\n  {line}\n}}"
    )
    entry = module.computations["e"]
    return operation_time(module, target, entry, entry.root)


@pytest.mark.parametrize(
    ("amount", "seconds"),
    [
        (Work(products=(("bfloat16", 4e12),), nbytes=1e9), 4.0),
        (Work(products=(("float32", 4e12),), nbytes=1e9), 8.0),
        (Work(products=(("bfloat16", 1e12), ("float32", 1e12))), 3.0),
        (Work(products=(("int8", 4e12),)), 4.0),  # of unknown dtypes: as bf16
        (Work(nbytes=5e9, elementwise=1e9), 5.0),
        (Work(nbytes=1e9, elementwise=5e9), 5.0),
    ],
)
def test_the_slower_of_computing_and_moving_decides(amount, seconds):
    assert roofline(GPU.machine, amount) == pytest.approx(seconds)


def test_attention_and_matmuls_reach_shares_of_the_peak_of_their_own():
    efficiency = {**GPU.machine.efficiency, "matmul": 0.5, "attention": 0.25}
    slower = dataclasses.replace(GPU.machine, efficiency=efficiency)
    products = (("bfloat16", 1e12),)
    assert roofline(slower, Work("matmul", products)) == pytest.approx(2.0)
    assert roofline(slower, Work("attention", products)) == pytest.approx(4.0)


def test_each_operation_also_has_to_be_started():
    machine = dataclasses.replace(
        GPU.machine, overhead={**GPU.machine.overhead, "operation": 0.5}
    )
    slow = dataclasses.replace(GPU, machine=machine)
    # 1000 bytes read and 1000 written.
    assert time_of("ROOT r = f32[250] copy(x)", slow) == ("other", 0.5 + 2e-6)
    assert time_of("ROOT r = f32[10,25] bitcast(x)", slow) == ("other", 0.0)


def test_on_a_tpu_the_cycles_of_the_compiler_count():
    line = f"ROOT r = f32[250] copy(x), {CYCLES}"
    assert time_of(line, TPU) == ("other", 3e-6)
    assert time_of(line, GPU) == ("other", 2e-6)


def test_an_operation_without_cycles_takes_what_its_bytes_take():
    assert time_of("ROOT r = f32[250] copy(x)", TPU) == ("other", 2e-6)


def test_a_program_of_the_cpu_compiler_has_no_cycles():
    stand_in = dataclasses.replace(TPU, compiler="cpu")
    line = f"ROOT r = f32[250] copy(x), {CYCLES}"
    assert time_of(line, stand_in) == ("other", 2e-6)
