# SPDX-License-Identifier: Apache-2.0
"""Experts, for GPUs and TPUs: each row meets its own alone."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

from tessera.analysis.flops import count
from tessera.foundations.config_files import configs_dir
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.layer import ExpertLayout, expert_layer
from tessera.ops.moe.routing import RoutingOptions
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run
from tessera.train.planner.layout import Layout
from tessera.train.planner.step_time import StepModel
from tests.targets.compiled.programs import (
    array,
    compile_without_spills,
    on_one_device,
    only_in_test_targets,
)

pytestmark = only_in_test_targets

GPU, TPU = "h100:1x1", "v5e:2x2"
TOKENS, WIDTH, HIDDEN, EXPERTS = 8192, 1024, 512, 64
OPTIONS = RoutingOptions(top_k=4)


def layer(x, weights):
    return expert_layer(x, weights, OPTIONS, ExpertLayout())[0]


def gradients(x, weights):
    """A number, and its gradients by tokens and weights."""

    def loss(x, weights):
        return jnp.square(layer(x, weights).astype(jnp.float32)).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))(x, weights)


@cache
def compiled(target, run):
    wide, narrow = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    shapes = (WIDTH, EXPERTS), wide, wide, narrow
    weights = Weights(*(array(*shape) for shape in shapes))
    return on_one_device(target, run, array(1, TOKENS, WIDTH), weights)


@pytest.mark.parametrize(("run", "passes"), [(layer, 1), (gradients, 3)])
def test_a_gpu_computes_at_most_a_fifth_more_than_is_needed(run, passes):
    flops = count(compiled(GPU, run).traced.graph.program).matmul
    needed = passes * 6 * OPTIONS.top_k * TOKENS * WIDTH * HIDDEN
    assert needed < flops < 1.2 * needed


@pytest.mark.parametrize("run", [layer, gradients])
def test_a_gpu_needs_hardly_more_memory_than_a_tpu(run):
    gpu, tpu = (compiled(target, run).memory.temporaries for target in (GPU, TPU))
    assert gpu < 1.3 * tpu


def test_its_kernels_spill_no_registers():
    compile_without_spills(compiled(GPU, gradients))


def test_the_planner_expects_the_memory_of_experts_on_two_axes():
    target = Target.parse("h100:1x8")
    words = ["data=synthetic", "model=moe_tiny", "model.mesh_shape=[[2,4],[fsdp,ep]]"]
    words += ["training.mixed_precision=bf16", "training.sequence_length=512"]
    words += ["training.micro_batch_size=64", "training.remat=full"]
    words += ["runtime.target=h100:1x8", "training.dry_run=true"]
    settings = compose(words, configs_dir()).config
    mesh = mesh_of_shape(settings.model.mesh_shape, target=target)
    estimate = StepModel.of(settings, target).memory(Layout.of(settings)).total
    peak = Run(settings, mesh).compiled.memory.peak
    assert estimate == pytest.approx(peak, rel=0.2)
