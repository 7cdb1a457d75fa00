# SPDX-License-Identifier: Apache-2.0
"""The trainer's step for eight TPU v5e, and v5p: collectives, dtypes and memory."""

import os
import re
import subprocess
import sys

import pytest

from tests.targets.compiled.programs import (
    ACTIVATIONS,
    LENGTH,
    MATRICES,
    NUM_LAYERS,
    NUM_PARAMETERS,
    ROWS,
    V5E,
    V5P,
    dtypes,
    only_in_test_targets,
    rows,
    trainer_step,
)

pytestmark = only_in_test_targets

# Temporaries in bytes with JAX 0.10.2; the tests allow 15 % more. They are what does
# not fit into the vector memory of the chip, of which attention's kernels reserve some;
# they store heads of 32 in 128 lanes.
TEMPORARIES = {
    "fsdp": 11_806_720,
    "tp": 8_887_296,
    "pp": 18_120_192,
    "dots": 22_390_784,
}
SLACK = 1.15


@pytest.mark.parametrize("layout", TEMPORARIES)
def test_the_memory_is_what_it_was(layout):
    temporaries = trainer_step(V5E, layout).memory.temporaries
    assert temporaries <= TEMPORARIES[layout] * SLACK + 2**20


@pytest.mark.parametrize("layout", TEMPORARIES)
def test_every_layout_attends_by_kernels(layout):
    """Also the stages of a pipeline, and by devices that have some of the heads."""
    text = trainer_step(V5E, layout).as_text()
    kernels = re.findall(r"%splash_mha_(fwd|dq|dkv)\S* = ", text)
    assert set(kernels) == {"fwd", "dq", "dkv"}
    assert "flash_attention_xla" not in text
    # ``dots`` saves residuals; a pipeline recomputes a stage, and then its layers.
    forward = {"dots": 1, "pp": 3}.get(layout, 2)
    assert kernels.count("fwd") == forward * kernels.count("dkv")


def test_fsdp_splits_parameters_and_optimizer_over_the_devices():
    tiles = 1.7  # a TPU stores arrays in tiles of 8 × 128, and these are small
    assert trainer_step(V5E, "fsdp").memory.arguments < (
        tiles * 3 * 4 * NUM_PARAMETERS / 8 + 4 * 4 * ROWS * LENGTH
    )


def scattered(text):
    """The results of all-reduces whose parts alone leave their fusion."""
    return re.findall(r"^%all-reduce-scatter\S* \(.*\) -> (.*) \{$", text, re.M)


def test_fsdp_reduce_scatters_gradients():
    compiled = trainer_step(V5E, "fsdp")
    (of_table,) = rows(compiled, "reduce-scatter", "fsdp")
    assert (dtypes(of_table), of_table.nbytes) == ({"f32"}, 4 * 264 * 128)
    fused = scattered(compiled.as_text())
    of_layers = max(fused, key=lambda shapes: shapes.count("f32"))
    # An eighth of each of the seven matrices of a layer.
    assert of_layers.count("f32[") == 7
    assert {"f32[16,4,32]", "f32[4,32,16]", "f32[512,16]", "f32[16,512]"} <= set(
        re.findall(r"f32\[[\d,]+\]", of_layers)
    )


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_layers_are_gathered_in_bf16(layout):
    compiled = trainer_step(V5E, layout)
    gathers = rows(compiled, "all-gather", "fsdp")
    gathers += rows(compiled, "collective-permute", "fsdp")
    in_layers = [row for row in gathers if "/while/" in row.op_name]
    assert in_layers
    assert all(dtypes(row) == {"bf16"} for row in in_layers)
    # The ids of tokens, whose rows are looked up, and the table for the logits.
    others = [row for row in gathers if row not in in_layers]
    assert [dtypes(row) for row in others] == [{"s32"}, {"bf16"}]


@pytest.mark.parametrize("target", [V5E, V5P])
def test_fsdp_gathers_parameters_twice(target):
    gathers = rows(trainer_step(target, "fsdp"), "all-gather", "fsdp")
    in_layers = [row for row in gathers if "/while/" in row.op_name]
    assert all(row.calls == NUM_LAYERS for row in in_layers)
    # With remat=full, forward and backward; each matrix on its own.
    again = [row for row in in_layers if "/rematted_computation/" in row.op_name]
    assert len(in_layers) == 2 * len(again) == 14
    assert sum(row.nbytes for row in again) == 2 * MATRICES
    assert sum(row.nbytes for row in in_layers) == 2 * 2 * MATRICES


def test_fsdp_gathers_half_of_the_parameters_asynchronously():
    gathers = rows(trainer_step(V5E, "fsdp"), "all-gather", "fsdp")
    in_layers = [row for row in gathers if "/while/" in row.op_name]
    assert sum(row.is_async for row in in_layers) >= len(in_layers) / 2


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_every_collective_is_planned_and_counted(layout):
    found = trainer_step(V5E, layout).collectives
    assert found.unplanned == ()
    of_layers = [row.calls for row in found.rows if "decoder)/while/" in row.op_name]
    # Some are in the loop of a windowed matmul, which is in that over the layers.
    assert of_layers
    assert {calls and calls % NUM_LAYERS for calls in of_layers} == {0}


def test_tp_all_reduces_activations():
    compiled = trainer_step(V5E, "tp")
    in_layers = [
        row
        for row in rows(compiled, "all-reduce", "tp")
        if "/while/" in row.op_name and row.nbytes == ACTIVATIONS
    ]
    # Attention and the MLP: forward, again for the backward pass, and backward.
    assert len(in_layers) == 6


def test_pp_sends_activations_and_gradients_asynchronously():
    compiled = trainer_step(V5E, "pp")
    sends = rows(compiled, "collective-permute", "pp")
    assert [row.nbytes for row in sends] == [ACTIVATIONS, ACTIVATIONS]
    assert compiled.as_text().count(" collective-permute-start(") == 2


def test_saved_matmuls_stay_on_their_devices():
    assert rows(trainer_step(V5E, "dots"), "all-gather", "dp") == []


def test_two_processes_compile_at_once():
    assert trainer_step(V5E, "fsdp")
    program = f"""if True:
        from tessera.targets.target import Target
        assert len(Target.parse({V5E!r}).devices) == 8"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)
