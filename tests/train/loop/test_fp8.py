# SPDX-License-Identifier: Apache-2.0
"""``training.mixed_precision=fp8``: which matmuls it is about, and on which meshes.

Meshes are compared with f32 activations. With bf16 ones the last bit of a sum differs
between meshes, and the rounding to 8 bits makes a step of it.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tessera.errors import SettingConflictError
from tessera.graph.jit import function
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.build_run import Run
from tessera.train.loop.pipelined_model import schedule_of
from tessera.train.models import DecoderModel
from tessera.train.models.pipeline_stages import split_of
from tests.train.config.command_lines import composed
from tests.train.loop.compiled_steps import (
    ADAMW,
    BATCH,
    CONFIG,
    COUNTED,
    CUBE,
    MICROBATCHES,
    ONE,
    RATE,
    distances,
    first_state,
    run,
)

SMALL = (
    *("model=tiny", "model.num_layers=2", "training.sequence_length=16"),
    *("data=synthetic", "training.mixed_precision=fp8"),
)
SEQUENCES = Mesh(("cp", "tp"), devices=range(4), shape=(2, 2))


def run_of(*overrides: str) -> Run:
    settings = composed(*SMALL, *overrides).config
    return Run(settings, mesh_of_shape(settings.model.mesh_shape))


def matmuls(program: jaxprs.Program) -> Counter[str]:
    """How many matmuls have operands and results of which dtypes."""
    found: Counter[str] = Counter()
    for equation in jaxprs.equations(program):
        if equation.primitive.name == "dot_general":
            operands = sorted(x.aval.dtype.name for x in equation.invars)
            found[f"{' '.join(operands)} -> {equation.outvars[0].aval.dtype}"] += 1
        for inner in jaxprs.inner_programs(equation):
            found += matmuls(inner)
    return found


# --- which matmuls


FORWARD = "float8_e4m3fn float8_e4m3fn -> bfloat16"
OF_ACTIVATIONS = "float8_e4m3fn float8_e5m2 -> bfloat16"
OF_WEIGHTS = "float8_e4m3fn float8_e5m2 -> float32"


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="one_device"),
        pytest.param(
            ("model.lora.rank=2", "recipe=none"), id="lora", marks=pytest.mark.full
        ),
        pytest.param(
            ("training.gradient_accumulation_steps=2", "model.mesh_shape=[[2],[pp]]"),
            id="pipeline",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_three_products_of_each_projection_are_fp8(overrides):
    made = run_of("training.remat=none", *overrides)
    traced = made.step.trace(made.abstract_state, made.abstract_batch)
    found = matmuls(traced.graph.program)
    of_fp8 = {name: count for name, count in found.items() if "float8" in name}
    expected = {FORWARD: 7, OF_ACTIVATIONS: 7, OF_WEIGHTS: 7}
    if made.model.adapters:  # the weights beside them are frozen
        del expected[OF_WEIGHTS]
    assert of_fp8 == expected
    # Those of attention and of the logits are not.
    assert found.total() - sum(of_fp8.values()) >= 9


# --- on which meshes

# The last bit of a sum in f32 differs between meshes and processors. Where it decides
# how a number is rounded to 8 bits, gradients differ by 5e-6 of their norm; without
# such a number by 2e-7. Rounding by another scale changes them by more than 1e-2.
FEW_ROUNDED_OTHERWISE = 5e-5


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "options"),
    [(CUBE, {"sequence_parallel": True}), (SEQUENCES, {})],
    ids=["cube", "cp"],
)
@pytest.mark.usefixtures("compiled_here")
def test_a_step_is_the_same_on_every_mesh(mesh, options):
    one, ran = run(ONE, fp8=True), run(mesh, fp8=True, **options)
    np.testing.assert_allclose(ran.metrics["loss"], one.metrics["loss"], rtol=1e-6)
    apart = distances(ran.gradients, jax.tree.map(np.asarray, one.gradients))
    assert max(apart.values()) <= FEW_ROUNDED_OTHERWISE, apart
    wide = run(mesh, **options)
    rounded = distances(ran.gradients, jax.tree.map(np.asarray, wide.gradients))
    assert min(rounded.values()) > 100 * FEW_ROUNDED_OTHERWISE, rounded
    # Gathers of parameters that were divided by a scale are planned as well.
    unplanned = [len(each.step.last.collectives.unplanned) for each in (ran, wide)]
    assert unplanned[0] == unplanned[1]
    assert abs(float(wide.metrics["loss"] / ran.metrics["loss"]) - 1) > 1e-5


@pytest.mark.full
def test_a_pipeline_has_the_gradients_of_one_device():
    mesh = Mesh(("pp", "fsdp"), devices=range(4), shape=(2, 2))
    config = StepConfig(
        model=DecoderModel(CONFIG, fp8=True, split=split_of(mesh, CONFIG, 1)),
        optimizer=ADAMW,
        learning_rate=RATE,
        mesh=mesh,
        accumulation=MICROBATCHES,
        loss_chunk=6,
        schedule=schedule_of(mesh, "zero_bubble", 1, MICROBATCHES),
    )

    @function(mesh=mesh, in_specs={"batch": batch_spec(config)})
    def step(params: Any, batch: Any) -> Any:
        return config.pipeline.gradients(params, batch, jnp.float32(1 / COUNTED))

    stored = config.model.stored(first_state().params)
    layouts = jax.tree.map(lambda s: NamedSharding(mesh.jax, s), config.zero.params)
    _, gradients = step(jax.device_put(stored, layouts), BATCH)
    one = run(ONE, fp8=True)
    apart = distances(
        config.model.plain(gradients), jax.tree.map(np.asarray, one.gradients)
    )
    assert max(apart.values()) <= FEW_ROUNDED_OTHERWISE, apart


@pytest.mark.full
def test_losses_with_bf16_activations_are_close_on_every_mesh():
    one, ran = (run(m, fp8=True, dtype="bfloat16").metrics["loss"] for m in (ONE, CUBE))
    np.testing.assert_allclose(ran, one, rtol=1e-3)


# --- what has no fp8


def test_experts_are_refused():
    with pytest.raises(SettingConflictError, match="the matmuls of experts have no 8-"):
        composed("model=moe_tiny", *SMALL[3:])


@pytest.mark.full
@pytest.mark.parametrize("target", ["a100:1x8", "v5e:2x4"])
def test_devices_without_fp8_are_refused(target):
    overrides = f"runtime.target={target}", "training.dry_run=true"
    with pytest.raises(
        SettingConflictError, match="no matmuls of 8-bit floating-point"
    ):
        composed(*SMALL, *overrides)
    composed(*SMALL[:4], *overrides)


@pytest.mark.parametrize("target", ["h100:1x8", "7x:2x2x1", "cpu:8"])
def test_devices_with_fp8_and_simulations_are_not(target):
    composed(*SMALL, f"runtime.target={target}", "training.dry_run=true")
