# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state in the memory of the host: where it lies, and that it works.

JAX's CPU backend has the memory kind ``pinned_host`` and runs such programs, although
its devices' memory is the host's; what an accelerator would be told is read from the
module lowered for CUDA, which needs none.
"""

import dataclasses
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tessera.analysis.inspection import inspect
from tessera.errors import HostMemoryError
from tessera.graph.lower.lower_to_jit import jitted
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop import optimizer_offload
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import init_state
from tessera.train.models import DecoderModel
from tests.small_model import SMALL

CONFIG = dataclasses.replace(SMALL, num_layers=1)
MESH = Mesh(["dp", "tp"], devices=range(8), shape=(4, 2))
ADAMW, RATE = make_optimizer(AdamWConfig(), steps=10, clip_norm=1.0)
PARAMS = len(jax.tree.leaves(DecoderModel(CONFIG).abstract()))


@dataclasses.dataclass
class Run:
    state: Any
    metrics: Any
    step: Any
    arguments: Any


@cache
def run(on_host: bool, dtype: str | None = None) -> Run:
    """Three steps under ZeRO's first stage."""
    config = StepConfig(
        model=DecoderModel(CONFIG, dtype=dtype),
        optimizer=ADAMW,
        learning_rate=RATE,
        mesh=MESH,
        zero_stage=1,
        offload_optimizer=on_host,
    )
    state = init_state(
        config.model,
        ADAMW,
        jax.random.key(0),
        MESH,
        zero_stage=1,
        offload_optimizer=on_host,
    )
    scale = LossScale.dynamic() if dtype == "float16" else None
    state = dataclasses.replace(state, loss_scale=scale)
    step = make_train_step(config, state)
    draw = np.random.default_rng(0).integers(0, 64, (1, 8, 16), np.int32)
    batch = jax.device_put(
        {
            "tokens": draw,
            "targets": np.roll(draw, -1, 2),
            "segment_ids": np.ones_like(draw),
            "positions": np.broadcast_to(np.arange(16, dtype=np.int32), draw.shape),
        },
        NamedSharding(MESH.jax, batch_spec(config)),
    )
    for _ in range(3):
        state, metrics = step(state, batch)
    return Run(state, metrics, step, (state, batch))


F16 = pytest.param("float16", marks=pytest.mark.full)


def kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.shape}


@pytest.mark.full
@pytest.mark.parametrize("dtype", [None, F16])
def test_moments_stay_on_the_host_and_everything_else_on_the_devices(dtype):
    state = run(True, dtype).state
    assert kinds(state.optimizer) == {"pinned_host"}
    assert kinds(state.params) == {"device"}
    counters = [x for x in jax.tree.leaves(state.optimizer) if not x.shape]
    assert {x.sharding.memory_kind for x in counters} == {"device"}
    assert run(True, dtype).step.num_programs() == 1


@pytest.mark.full
@pytest.mark.parametrize("dtype", [None, F16])
def test_the_numbers_are_those_of_moments_on_the_devices(dtype):
    here, there = run(True, dtype), run(False, dtype)
    device = jax.tree.map(lambda x: x.sharding, there.state)
    for got, want in zip(
        jax.tree.leaves(jax.device_put(here.state, device)),
        jax.tree.leaves(there.state),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    assert float(here.metrics["loss"]) == float(there.metrics["loss"])


@pytest.mark.full
def test_inspection_says_what_lies_on_the_host():
    found = inspect(run(True).state)
    moments = 2 * inspect(run(True).state.params).local_nbytes / 4
    assert found.host_nbytes == pytest.approx(moments, rel=0.05)
    assert "of it on the host" in str(found)
    lines = [line for line in str(found).splitlines() if "mu" in line and "[1," in line]
    assert lines
    assert all("on the host" in line for line in lines)
    assert inspect(run(False).state).host_nbytes == 0
    assert "host" not in str(inspect(run(False).state))


@pytest.mark.full
def test_an_accelerator_is_told_to_fetch_every_moment_and_to_store_it():
    traced = run(True).step.trace(*run(True).arguments)
    structs = [jaxprs.struct(value.aval) for value in traced.graph.inputs]
    step = jitted(traced.origin, traced.graph, traced.call)
    count = len(jax.tree.leaves(run(True).arguments[0]))
    parts = structs[:count], structs[count:]
    lowered = step.trace(*parts, (), ()).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    moments = 2 * PARAMS
    fetched = re.findall(r"annotate_device_placement\(%arg\d+\).*\"device\"", text)
    assert len(fetched) == moments
    stored = re.findall(r"annotate_device_placement\(.*\"pinned_host\"", text)
    assert len(stored) >= moments
    header = text.split("func.func public @main")[1].split("{\n")[0]
    # Of the arguments and of the results.
    assert header.count('mhlo.memory_kind = "pinned_host"') == 2 * moments


def test_arrays_on_the_host_are_another_program_than_arrays_on_the_devices():
    import tessera as ts

    @ts.function
    def total(x):
        return jnp.sum(jax.device_put(x, jax.memory.Space.Device))

    place = NamedSharding(MESH.jax, jax.sharding.PartitionSpec("dp"))
    host = place.with_memory_kind("pinned_host")
    x = np.arange(8, dtype=np.float32)
    for sharding in (place, host, place, host):
        assert float(total(jax.device_put(x, sharding))) == 28
    assert total.num_programs() == 2


def test_a_backend_without_host_memory_is_refused(monkeypatch):
    optimizer_offload.check_host_memory(MESH)
    memories = [SimpleNamespace(kind="device"), SimpleNamespace(kind="vmem")]
    device = SimpleNamespace(
        device_kind="abacus", platform="abacus", addressable_memories=lambda: memories
    )
    mesh: Any = SimpleNamespace(
        compile_mesh=SimpleNamespace(devices=np.array([device])), target=None
    )
    with pytest.raises(HostMemoryError) as caught:
        optimizer_offload.check_host_memory(mesh)
    assert str(caught.value) == (
        "[T703] devices of 'abacus' have no pinned_host memory to hold the "
        "optimizer's state\n"
        "  got: training.offload_optimizer=true, memories device, vmem\n"
        "  fix: use training.offload_optimizer=false; training.zero_stage=1 splits "
        "the state over dp instead\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T703.html"
    )
    assert optimizer_offload.notes(mesh) == []


def test_on_cpu_a_note_says_that_nothing_is_saved():
    assert optimizer_offload.notes(MESH) == [
        "offload_optimizer saves nothing on cpu: its devices' memory is the host's"
    ]
