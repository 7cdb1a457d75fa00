# SPDX-License-Identifier: Apache-2.0
"""Every stage of ZeRO trains like one device, and each device holds what it promises.

What the stages are compared with knows nothing of Tessera: ``jax.grad`` of the plain
model and Optax on one device. Parameters are compared after three steps of AdamW, whose
epsilon is large enough for a step to be a smooth function of the gradient.
"""

import dataclasses
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis.inspection import inspect
from tessera.mesh import Mesh
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.pipelined_model import schedule_of
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import init_state, state_specs
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.pipeline_stages import split_of

STEPS, MICROBATCHES, ROWS, LENGTH = 3, 2, 8, 16
CONFIG = DecoderConfig(
    vocab_size=64,
    d_model=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    window=8,
    query_pre_attn_scalar=8,
    global_every=3,
)
MODEL, KEY = DecoderModel(CONFIG), jax.random.key(0)
ADAMW, RATE = make_optimizer(
    AdamWConfig(epsilon=1e-3, warmup_steps=1), steps=20, clip_norm=1.0
)
MESHES = {
    "dp": Mesh(["dp"], devices=range(8)),
    "dp_tp": Mesh(["dp", "tp"], devices=range(8), shape=(4, 2)),
    "dp_pp": Mesh(["dp", "pp"], devices=range(8), shape=(4, 2)),
    "dp_fsdp_tp": Mesh(["dp", "fsdp", "tp"], devices=range(8), shape=(2, 2, 2)),
}
CASES = [
    ("dp", 3),
    *(
        pytest.param(name, stage, marks=pytest.mark.full)
        for name, stages in (
            # Pipelines at the other stages are in test_pipelines.py.
            *(("dp", [1, 2]), ("dp_tp", [3]), ("dp_fsdp_tp", [2]), ("dp_pp", [2])),
        )
        for stage in stages
    ),
]


def batches() -> list[dict[str, np.ndarray]]:
    """Random tokens in two microbatches; a quarter of the targets do not count."""
    draw = np.random.default_rng(0)
    shape = (MICROBATCHES, ROWS, LENGTH)
    found = []
    for _ in range(STEPS):
        tokens = draw.integers(0, 64, (*shape[:2], LENGTH + 1), np.int32)
        hidden = draw.random(shape) < 0.25
        found.append(
            {
                "tokens": tokens[..., :-1],
                "targets": np.where(hidden, np.int32(-100), tokens[..., 1:]),
                "segment_ids": np.ones(shape, np.int32),
                "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
            }
        )
    return found


@cache
def expected() -> tuple[list[float], Any]:
    """Losses and final parameters of the plain model on one device."""

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        whole = {name: array.reshape(-1, LENGTH) for name, array in batch.items()}
        logits = MODEL.apply(params, whole["tokens"], positions=whole["positions"])
        counts = whole["targets"] != -100
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(counts, whole["targets"], 0)
        )
        return jnp.where(counts, losses, 0.0).sum() / counts.sum(dtype=jnp.float32)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = ADAMW.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = MODEL.init(KEY)
    state, losses = ADAMW.init(params), []
    for batch in batches():
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, params)


@dataclasses.dataclass
class Run:
    """Losses of all steps, the state after the last, and the program."""

    config: StepConfig
    losses: list[float]
    state: Any
    compiled: Any


@cache
def train(name: str, stage: int) -> Run:
    mesh = MESHES[name]
    model = DecoderModel(CONFIG, split=split_of(mesh, CONFIG, chunks=1))
    config = StepConfig(
        model=model,
        optimizer=ADAMW,
        learning_rate=RATE,
        mesh=mesh,
        accumulation=MICROBATCHES,
        zero_stage=stage,
        schedule=schedule_of(mesh, "1f1b", 1, MICROBATCHES),
        loss_chunk="auto",
    )
    state = init_state(model, ADAMW, KEY, mesh, zero_stage=stage)
    step = make_train_step(config, state)
    place, losses = NamedSharding(mesh.jax, batch_spec(config)), []
    for batch in batches():
        state, metrics = step(state, jax.device_put(batch, place))
        losses.append(float(metrics["loss"]))
    assert step.num_programs() == 1
    return Run(config, losses, state, step.last)


def named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}


@pytest.mark.slow(reason="the one test of ZeRO against an oracle of its own")
@pytest.mark.usefixtures("third_stage")
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_losses_and_parameters_are_those_of_one_device(name, stage):
    run, (losses, params) = train(name, stage), expected()
    np.testing.assert_allclose(run.losses, losses, rtol=2e-5)
    assert np.ptp(losses) > 0.02, "the losses have to move to be worth comparing"
    first, got = MODEL.init(KEY), run.config.model.plain(run.state.params)
    first, got = named(first), named(got)
    for path, want in named(params).items():
        assert np.linalg.norm(first[path] - want) > 0, path
        apart = np.linalg.norm(got[path] - want)
        assert apart <= 2e-5 * np.linalg.norm(want), path


# --- what each device holds


@pytest.fixture(scope="module")
def third_stage() -> None:
    """Trained before the first test that looks at it, whichever that is."""
    train("dp", 3)


WHOLE, COUNTERS = 4 * MODEL.num_params, 2 * 4


@pytest.mark.usefixtures("third_stage")
@pytest.mark.parametrize(
    ("stage", "params"),
    [*(pytest.param(stage, 1, marks=pytest.mark.full) for stage in (1, 2)), (3, 8)],
)
def test_each_device_holds_the_share_that_the_stage_promises(stage, params):
    run = train("dp", stage)
    held = inspect(run.state.params), inspect(run.state.optimizer)
    held = [inspection.local_nbytes for inspection in held]
    assert held == [WHOLE / params, 2 * WHOLE / 8 + COUNTERS]
    # The program takes the state, its number and this device's part of the batch, and
    # gives the new state in the place of the old one.
    batch = 4 * MICROBATCHES * ROWS // 8 * LENGTH * 4
    assert run.compiled.memory.arguments == sum(held) + 4 + batch
    assert run.compiled.memory.aliased == sum(held) + 4


@pytest.mark.full
def test_what_tp_splits_is_split_over_dp_as_well():
    params = train("dp_tp", 3).state.params
    assert params["decoder"]["mlp"]["up"]["kernel"].sharding.spec == P(None, "dp", "tp")
    assert params["embedding"].sharding.spec == P("tp", "dp")
    assert params["decoder"]["pre_mlp_norm"]["scale"].sharding.spec == P(None, "dp")
    # Stage 2 on all three axes: parameters as the model has them, moments split thrice.
    run = train("dp_fsdp_tp", 2)
    specs = state_specs(MODEL, ADAMW, run.config.mesh, zero_stage=2)
    assert specs.params["embedding"] == P("tp", "fsdp")
    assert P(("tp", "dp"), "fsdp") in jax.tree.leaves(specs.optimizer)
    assert inspect(run.state.optimizer).local_nbytes < 2 * WHOLE / 7


@pytest.mark.usefixtures("third_stage")
@pytest.mark.parametrize(
    "stage",
    [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2)), 3],
)
def test_gradients_are_split_from_the_second_stage_on(stage):
    loops = _loops(train("dp", stage))
    forward, backward, microbatches = sorted(loops, key=_kind)
    whole, share = "f32[3,32,64]", "f32[3,32,8]"  # of gate and of up
    weights = whole if stage < 3 else share
    gradients = whole if stage < 2 else share
    assert _count(forward, whole, share) == _counted([weights] * 2, whole, share)
    held = [weights] * 2 + [gradients] * 2
    assert _count(backward, whole, share) == _counted(held, whole, share)
    # From the first stage on the sum is split: the optimizer asks for no more.
    held = [weights] * 2 + [whole if stage < 1 else share] * 2
    assert _count(microbatches, whole, share) == _counted(held, whole, share)


def _loops(run: Run) -> list[str]:
    """What each loop carries, without those that XLA expands scatters into."""
    lines = run.compiled.as_text().splitlines()
    written = [line for line in lines if '/scatter-add"' not in line]
    return re.findall(r"= \((.*?)\) while\(", "\n".join(written))


def _kind(loop: str) -> int:
    """The loop over microbatches last, the one over layers backwards before it."""
    return 1000 if "s32[2,1,16]" in loop else loop.count("f32[")


def _count(loop: str, *shapes: str) -> list[int]:
    return [loop.count(shape + "{") for shape in shapes]


def _counted(held: list[str], *shapes: str) -> list[int]:
    return [held.count(shape) for shape in shapes]


@pytest.mark.full
def test_temporary_memory_falls_by_the_gradients_that_are_split():
    plain, first, second = (train("dp", s).compiled.memory for s in (0, 1, 2))
    embedding = 4 * CONFIG.vocab_size * CONFIG.d_model
    # First the sum over microbatches, and the update that waits to be applied until it
    # is known to be finite; then what the loop over layers leaves behind.
    saved = plain.temporaries - first.temporaries
    assert WHOLE * 7 / 8 <= saved <= 2 * WHOLE * 7 / 8
    saved = first.temporaries - second.temporaries
    left = (WHOLE - embedding) * 7 / 8
    assert left <= saved <= WHOLE


@pytest.mark.full
def test_a_pipeline_splits_the_gradients_of_its_stages_as_well():
    loops = _loops(train("dp_pp", 2))
    # Two layers of a stage: what the backward loop over layers stacks, and the sums
    # that the loop over ticks carries.
    stacked = [_count(loop, "f32[2,32,64]", "f32[2,32,16]") for loop in loops]
    assert [2, 2] in stacked
    summed = [_count(loop, "f32[1,2,32,64]", "f32[1,2,32,16]") for loop in loops]
    assert [2, 2] in summed


@pytest.mark.full
def test_each_stage_sends_what_its_paper_says():
    """Where XLA makes no reduce-scatters, as on CPU, it reduces all and keeps a share.

    So gradients are in this ledger with all their bytes at every stage, and only what
    is gathered differs: nothing, the new parameters once, the weights at every use.
    """
    totals = [train("dp", s).compiled.collectives.totals() for s in (0, 1, 2, 3)]
    reduced = [total[("dp",), "all-reduce"].nbytes for total in totals]
    assert reduced[1:] == [reduced[1]] * 3
    assert reduced[1] == pytest.approx(reduced[0], abs=200)  # norms of the gradients
    gathered = [total.get((("dp",), "all-gather")) for total in totals]
    assert gathered[0] is None
    assert [total.nbytes for total in gathered[1:3]] == [WHOLE, WHOLE]
    uses = 2 * MICROBATCHES
    assert (uses - 0.5) * WHOLE < gathered[3].nbytes < uses * WHOLE
    rows = train("dp", 3).compiled.collectives.rows
    weights = {tuple(leaf.shape) for leaf in jax.tree.leaves(MODEL.abstract())}
    slices = weights | {shape[1:] for shape in weights}
    for row in rows:
        if row.kind == "all-gather":
            assert {tuple(array.dims) for array in row.arrays} <= slices, row
