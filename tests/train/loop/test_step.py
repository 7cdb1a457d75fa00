# SPDX-License-Identifier: Apache-2.0
"""The trainer's step: its gradients, its numbers, its precision, its communication."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.tracing.casts import PARAMETER_CAST
from tessera.train.config.optimizer_config import AdafactorConfig, AdamWConfig
from tessera.train.loop.optimizers import make_optimizer, make_schedule
from tessera.train.loop.step import make_eval_step, make_train_step
from tessera.train.loop.train_state import (
    TrainState,
    abstract_state,
    init_state,
    state_specs,
)
from tessera.train.models import DecoderModel
from tests.train.loop.compiled_steps import (
    ADAMW,
    BATCH,
    CONFIG,
    COUNTED,
    CUBE,
    MICROBATCHES,
    ONE,
    Ran,
    config_on,
    distances,
    first_state,
    placed,
    plain_loss_and_gradients,
    put,
    run,
)

# --- gradients


# Also split along the sequence, which changes nothing that is tested.
SELDOM = {"sync_every": 2, "sequence_parallel": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param(ONE, {}, id="one_device"),
        pytest.param(CUBE, {}, id="cube"),
        pytest.param(CUBE, SELDOM, id="sync_2"),
    ],
)
def test_an_accumulated_step_has_the_gradients_of_the_full_batch(mesh, options):
    loss, gradients = plain_loss_and_gradients()
    ran = run(mesh, **options)
    apart = distances(ran.gradients, gradients)
    assert max(apart.values()) <= 2e-6, apart
    np.testing.assert_allclose(ran.metrics["loss"], loss, rtol=1e-6)


@pytest.mark.full
def test_syncing_less_often_gives_the_same_gradients():
    often, seldom = run(CUBE), run(CUBE, **SELDOM)
    apart = distances(seldom.gradients, jax.tree.map(np.asarray, often.gradients))
    assert max(apart.values()) <= 1e-6, apart
    np.testing.assert_allclose(
        seldom.metrics["grad_norm"], often.metrics["grad_norm"], rtol=1e-6
    )


@pytest.mark.full
def test_the_metrics_are_those_of_the_full_batch():
    loss, gradients = plain_loss_and_gradients()
    metrics = run(ONE).metrics
    assert metrics.keys() == {"loss", "grad_norm", "learning_rate", "tokens"}
    assert {(m.shape, m.dtype.name) for m in metrics.values()} == {((), "float32")}
    norm = math.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradients)))
    assert norm > 1.0, "before clipping to 1"
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    assert float(metrics["tokens"]) == COUNTED
    assert metrics["learning_rate"] == make_schedule(AdamWConfig(), 10)(0)


@pytest.mark.full
def test_parameters_become_what_optax_makes_of_the_gradients():
    ran, before = run(ONE), first_state()
    kept = jax.tree.map(jnp.asarray, plain_loss_and_gradients()[1])
    updates, _ = jax.jit(ADAMW.update)(kept, ADAMW.init(before.params), before.params)
    expected = optax.apply_updates(before.params, updates)
    for got, want in zip(
        jax.tree.leaves(ran.state.params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-7, rtol=1e-6)
    assert int(ran.state.step) == 1


@pytest.mark.full
def test_a_batch_of_padding_alone_teaches_nothing():
    empty = {**BATCH, "targets": np.full_like(BATCH["targets"], -100)}
    state, metrics = run(ONE).again(first_state(), empty)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0.0
    assert float(metrics["tokens"]) == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    scale = "scale"  # norms do not decay, so nothing at all may move them
    before = first_state().params["final_norm"][scale]
    np.testing.assert_array_equal(state.params["final_norm"][scale], before)


# --- what is sent


def gradient_reductions(ran: Ran) -> tuple[int, int]:
    """Calls and bytes of the all-reduces of arrays over dp or fsdp."""
    calls, sent = 0, 0
    for row in ran.step.last.collectives.rows:
        # XLA may send a loss or a count in the same call.
        arrays = sum(shape.nbytes for shape in row.arrays if shape.dims)
        over_data = set(row.axes) <= {"dp", "fsdp"}
        if row.kind == "all-reduce" and over_data and arrays > 64:
            calls, sent = calls + row.calls, sent + row.calls * arrays
    return calls, sent


def local_bytes(mesh: Mesh) -> int:
    """Bytes of the parameters on one device where fsdp splits none of them."""
    model, total = DecoderModel(CONFIG), 0
    layouts = jax.tree.leaves(model.layouts(mesh), is_leaf=lambda x: isinstance(x, P))
    for leaf, spec in zip(jax.tree.leaves(model.abstract()), layouts, strict=True):
        parts = 2 if "tp" in jax.tree.leaves(tuple(spec)) else 1
        total += 4 * leaf.size // parts
    return total


@pytest.mark.full
@pytest.mark.parametrize("every", [SELDOM["sync_every"], MICROBATCHES])
def test_gradients_are_sent_once_in_so_many_microbatches(every):
    calls, sent = gradient_reductions(run(CUBE, **SELDOM | {"sync_every": every}))
    assert calls == MICROBATCHES // every
    assert sent == calls * local_bytes(CUBE)


@pytest.mark.full
def test_by_default_gradients_are_sent_with_every_microbatch():
    calls, sent = gradient_reductions(run(CUBE))
    assert calls >= MICROBATCHES
    # Over dp the shard of fsdp is enough, and over fsdp all of it.
    assert sent > MICROBATCHES * local_bytes(CUBE)


@pytest.mark.full
def test_syncing_means_nothing_without_data_parallel_devices():
    def program(every: int) -> str:
        config = config_on(Mesh(("tp",), devices=range(4)), sync_every=every)
        state = abstract_state(config.model, config.optimizer)
        return make_train_step(config, state).trace(state, BATCH).as_text()

    assert program(2) == program(1)


# --- memory


@pytest.mark.slow(reason="the one test that compiles the whole step twice")
def test_the_given_state_is_donated():
    ran = run(CUBE)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(ran.given))
    memory = ran.step.last.memory
    state = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(ran.state)
    )
    assert memory.aliased == state


def test_the_new_state_lies_where_the_old_one_lay():
    ran = run(CUBE)
    specs = state_specs(ran.config.model, ran.config.optimizer, CUBE)
    for leaf, spec in zip(
        jax.tree.leaves(ran.state),
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(NamedSharding(CUBE.jax, spec), leaf.ndim)
        assert leaf.dtype in (jnp.float32, jnp.int32)


def test_gradients_are_laid_out_like_their_parameters():
    ran = run(CUBE)
    for gradient, param in zip(
        jax.tree.leaves(ran.gradients), jax.tree.leaves(ran.state.params), strict=True
    ):
        assert gradient.sharding == param.sharding


@pytest.mark.full
def test_factored_moments_train_on_a_mesh():
    config = AdafactorConfig(least_dim_to_factor=16)
    optimizer, rate = make_optimizer(config, steps=10)
    config = dataclasses.replace(
        config_on(CUBE, accumulation=1), optimizer=optimizer, learning_rate=rate
    )
    state = init_state(config.model, optimizer, jax.random.key(0), CUBE)
    step = make_train_step(config, state)
    batch = put(config, {name: array[:1] for name, array in BATCH.items()})
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    assert step.num_programs() == 1


# --- precision


def equations(program: Any) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Every equation of a program, nested ones too, and who made each variable."""
    makers: dict[Any, Any] = {}
    for equation in jaxprs.equations(program):
        yield equation, makers
        for _, inner in jaxprs.nested(equation):
            yield from equations(inner)
        makers.update(dict.fromkeys(equation.outvars, equation))


def traced(dtype: str | None, **options: Any) -> Any:
    config = config_on(CUBE, dtype=dtype, **options)
    scale = LossScale.dynamic() if dtype == "float16" else None
    state = abstract_state(config.model, config.optimizer, loss_scale=scale)
    return make_train_step(config, state).trace(state, BATCH).graph.program


# Four of the attention's projections, three of the MLP and the logits have one forward
# and two backward. Of blocks that are seen whole, and of those seen in part, attention
# has two forward; backward the first of them again and two for each.
MATMULS = 3 * 8 + 2 * (2 + 5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("bfloat16", (8, 7)),
        pytest.param("float16", (5, 10), marks=pytest.mark.full),
    ],
)
def test_every_matmul_of_forward_and_backward_has_narrow_operands(dtype, bits):
    """And an f32 result: on CPU the operands are cast to f32, which is exact."""
    matmuls = [
        (equation, makers)
        for equation, makers in equations(traced(dtype))
        if equation.primitive is jax.lax.dot_general_p
    ]
    wide = [e for e, _ in equations(traced(None)) if "dot_general" in str(e.primitive)]
    assert len(matmuls) == len(wide) == MATMULS
    for equation, makers in matmuls:
        for operand in equation.invars:
            maker = makers[operand]
            assert maker.primitive is jax.lax.reduce_precision_p, equation
            params = maker.params
            assert (params["exponent_bits"], params["mantissa_bits"]) == bits
            assert makers[maker.invars[0]].invars[0].aval.dtype == dtype
        assert equation.outvars[0].aval.dtype == jnp.float32


@pytest.mark.slow(reason="it compiles several programs")
def test_activations_between_layers_and_for_the_backward_pass_are_narrow():
    forward = next(
        equation
        for equation, _ in equations(traced("bfloat16"))
        if equation.primitive.name == "scan"
        and jaxprs.scan_sizes(equation)[1] == 1
        and equation.params["length"] == CONFIG.num_layers
    )
    of_tokens = [var.aval for var in forward.outvars if var.aval.ndim > 3]
    wide = [aval.size for aval in of_tokens if aval.dtype != jnp.bfloat16]
    # The logs of the sums of attention's weights, one for each query.
    queries = CONFIG.num_layers * BATCH["tokens"][0].size * CONFIG.num_heads
    assert wide == [queries]
    assert len(of_tokens) > 10


def test_in_f32_nothing_is_narrow():
    dtypes = {
        variable.aval.dtype
        for equation, _ in equations(traced(None))
        for variable in equation.outvars
    }
    assert not dtypes & {jnp.dtype("bfloat16"), jnp.dtype("float16")}


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [1, MICROBATCHES])
def test_gradients_of_parameters_are_never_rounded(accumulation):
    """Nothing but casts of activations' gradients makes an f32 of a narrow number."""
    updates = [
        equation
        for equation, _ in equations(traced("bfloat16", accumulation=accumulation))
        if equation.primitive.name == "convert_element_type"
        and PARAMETER_CAST in str(equation.source_info.name_stack)
        and equation.outvars[0].aval.dtype == jnp.float32
    ]
    # The rows of the embedding: they are scattered in f32 after this.
    assert [len(each.invars[0].aval.shape) for each in updates] == [3]


@pytest.mark.full
def test_gradients_are_reduced_in_the_narrow_dtype_where_that_is_asked_for():
    """Only rows of the embedding are added up in f32, and microbatches."""

    def results(**options: Any) -> list[tuple[str, tuple[int, ...]]]:
        return [
            (equation.outvars[0].aval.dtype.name, equation.outvars[0].aval.shape)
            for equation, _ in equations(traced("bfloat16", **options))
            if equation.primitive.name in ("psum", "psum_invariant")
        ]

    # By the logits and by the rows of tokens; tp splits the vocabulary.
    table = (CONFIG.vocab_size // 2, CONFIG.d_model)
    assert [dtype for dtype, shape in results() if shape == table] == ["float32"] * 2
    found = [dtype for dtype, shape in results(reduces_narrow=True) if shape == table]
    assert sorted(found) == ["bfloat16", "float32"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [pytest.param("bfloat16", 7, marks=pytest.mark.full), ("float16", 10)],
)
def test_a_narrow_step_is_about_the_same(dtype, bits):
    error = 10 * 2.0 ** -(bits + 1)
    ran, (loss, gradients) = run(ONE, dtype=dtype), plain_loss_and_gradients()
    assert abs(float(ran.metrics["loss"]) / loss - 1) < error / 10
    assert float(ran.metrics["loss"]) != loss
    apart = distances(ran.gradients, gradients)
    assert max(apart.values()) < error, apart
    assert min(apart.values()) > 1e-5, "it is computed in the narrow dtype"
    leaves = jax.tree.leaves((ran.state.params, ran.state.optimizer))
    assert {leaf.dtype.name for leaf in leaves} == {"float32", "int32"}


# --- fp16


def with_scale(scale: float, streak: int) -> TrainState:
    held = dataclasses.replace(
        LossScale.dynamic(), value=jnp.float32(scale), streak=jnp.int32(streak)
    )
    return dataclasses.replace(first_state(scaled=True), loss_scale=held)


@pytest.mark.full
def test_a_step_says_the_loss_scale_that_it_used():
    metrics = run(ONE, dtype="float16").metrics
    assert float(metrics["loss_scale"]) == 32768.0
    assert float(metrics["overflow"]) == 0.0


@pytest.mark.full
def test_the_loss_scale_grows_after_two_hundred_steps_without_overflow():
    state, _ = run(ONE, dtype="float16").again(with_scale(1024, 199))
    assert (float(state.loss_scale.value), int(state.loss_scale.streak)) == (2048, 0)


@pytest.mark.full
def test_an_overflowed_step_changes_nothing_but_the_loss_scale():
    # Gradients of the logits are up to the scale itself: too large for an f16.
    before = with_scale(2.0**24, 7)
    state, metrics = run(ONE, dtype="float16").again(before)
    assert float(metrics["overflow"]) == 1.0
    assert float(metrics["loss_scale"]) == 2.0**24
    assert not np.isfinite(metrics["grad_norm"])
    np.testing.assert_allclose(
        metrics["loss"], run(ONE, dtype="float16").metrics["loss"], rtol=1e-3
    )
    assert (float(state.loss_scale.value), int(state.loss_scale.streak)) == (2.0**23, 0)
    old = dataclasses.replace(before, loss_scale=None)
    new = dataclasses.replace(state, loss_scale=None)
    for left, right in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(left, right)


# --- validation


@pytest.mark.slow(reason="the one test of the validation step")
def test_validation_gives_summed_loss_and_counted_tokens():
    config = config_on(CUBE)
    evaluate = make_eval_step(config)
    place = NamedSharding(CUBE.jax, P(("dp", "fsdp")))
    params = placed(config, first_state()).params
    total, counted = 0.0, 0.0
    for index in range(MICROBATCHES):
        micro = {name: array[index] for name, array in BATCH.items()}
        sums, tokens = evaluate(params, jax.device_put(micro, place))
        total, counted = total + float(sums["loss"]), counted + float(tokens)
    assert counted == COUNTED
    np.testing.assert_allclose(
        total / counted, plain_loss_and_gradients()[0], rtol=1e-6
    )
    assert evaluate.num_programs() == 1
