# SPDX-License-Identifier: Apache-2.0
"""The loop gives what autodiff gives, for any legal table, and is no longer for more.

The model is made so that everything the loop sums has parts from several stages: shared
weights are read by the first and the last, every layer and both ends read something of
the microbatch, and each stage has a statistic.
"""

import dataclasses
import random
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis import hlo
from tessera.analysis.ledger import collectives
from tessera.analysis.timeline.schedule import Branch, Loop, TimedSteps
from tessera.graph.pipelining import Op, Schedule, custom, schedule
from tessera.graph.pipelining.device_stages import Stages
from tessera.graph.pipelining.device_tick import Gradients
from tessera.graph.pipelining.schedule_loop import Pipeline
from tessera.graph.pipelining.schedule_table import Placement
from tessera.mesh import Mesh
from tests.graph.pipelines import cases

DEPTH, ROWS, WIDTH, HIDDEN, CLASSES = 2, 4, 8, 16, 6
SEED = jnp.float32(0.5)


def mesh_of(**shape: int) -> Mesh:
    size = int(np.prod([*shape.values()]))
    return Mesh(list(shape), devices=range(size), shape=[*shape.values()])


def constrained(x: jax.Array, *entries: Any) -> jax.Array:
    """Laid out over the axes of the mesh that are not the pipeline's, if it has any."""
    mesh = jax.sharding.get_abstract_mesh()
    if "tp" not in mesh.axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*entries)))


def layers(weights: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Residual layers ``[DEPTH, ...]`` on ``[ROWS, WIDTH]``."""

    def layer(x: jax.Array, both: Any) -> tuple[jax.Array, None]:
        up, down = both
        h = constrained(jnp.tanh(x @ up), "fsdp", "tp")
        return constrained(x + h @ down * scale, "fsdp", None), None

    return jax.lax.scan(layer, x, weights)[0]


def first(shared: Any, micro: Any) -> jax.Array:
    return micro["x"] + shared["table"].sum(axis=0) * 0.1


def last(shared: Any, x: jax.Array, micro: Any) -> jax.Array:
    scores = jax.nn.log_softmax(x @ shared["table"].T)
    chosen = micro["label"][:, None] == jnp.arange(CLASSES)
    return -jnp.sum(jnp.where(chosen, scores, 0.0) * micro["weight"][:, None])


def stages_of(count: int, *, recomputes: bool = False) -> Stages:
    """As many virtual stages."""

    def run(weights: Any, shared: Any, wire: Any, micro: Any, index: Any) -> Any:
        x = jax.lax.cond(index == 0, lambda: first(shared, micro), lambda: wire["x"])
        x = layers(weights, x, micro["scale"])
        outputs = {"x": jnp.where(index == count - 1, x, 0.0)}
        # Each stage has a part of the loss, as layers with routers have.
        extra = 0.01 * jnp.square(x).sum()
        return {"x": x}, extra, (outputs, {"runs": jnp.float32(1.0), "sum": x.sum()})

    def head(_: Any, shared: Any, out: Any, micro: Any) -> Any:
        (wire, outputs), half = out, jnp.float32(0.5)
        x = half * wire["x"] + half * outputs["x"]  # which are the same
        return last(shared, x, micro), {"heads": jnp.float32(1.0)}

    wire = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}
    return Stages([run], wire, head, recomputes)


def arguments(count: int, size: int, microbatches: int) -> tuple[Any, Any, Any]:
    """Weights ``[chunks, stages, DEPTH, ...]``, shared weights, microbatches."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape, scale=0.3), jnp.float32)

    lead = (count // size, size, DEPTH)
    weights = normal(*lead, WIDTH, HIDDEN), normal(*lead, HIDDEN, WIDTH)
    micros = {
        "label": jnp.asarray(draw.integers(0, CLASSES, (microbatches, ROWS)), "int32"),
        "scale": normal(microbatches),
        # Of one sign, so that losses do not cancel.
        "weight": jnp.exp(normal(microbatches, ROWS)),
        "x": normal(microbatches, ROWS, WIDTH),
    }
    return weights, {"table": normal(CLASSES, WIDTH)}, micros


FLOATS = frozenset({1, 2, 3})  # of the leaves of the microbatches


def by_autodiff(weights: Any, shared: Any, micros: Any) -> Gradients:
    """The same sums, of the stages one after the other."""
    flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), weights)
    count = flat[0].shape[0]

    def one(flat: Any, shared: Any, micro: Any) -> Any:
        x, total = first(shared, micro), jnp.float32(0.0)
        extra = jnp.float32(0.0)
        for stage in range(count):
            x = layers((flat[0][stage], flat[1][stage]), x, micro["scale"])
            total = total + x.sum()
            extra = extra + 0.01 * jnp.square(x).sum()
        return last(shared, x, micro) + extra, (x, total)

    def loss(flat: Any, shared: Any, floats: Any) -> Any:
        given = {**floats, "label": micros["label"]}
        losses, (x, totals) = jax.vmap(one, in_axes=(None, None, 0))(
            flat, shared, given
        )
        return SEED * losses.sum(), (losses.sum(), x, totals.sum())

    floats = {name: array for name, array in micros.items() if name != "label"}
    found = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(flat, shared, floats)
    (own, of_shared, of_micros), (total, x, statistic) = found
    return Gradients(
        loss=total,
        statistics=(
            {"runs": jnp.float32(count * len(micros["label"])), "sum": statistic},
            {"heads": jnp.float32(len(micros["label"]))},
        ),
        weights=jax.tree.map(lambda g, w: g.reshape(w.shape), own, weights),
        shared=of_shared,
        micros=dict(enumerate([of_micros[k] for k in sorted(of_micros)], start=1)),
        outputs={"x": x},
    )


def close(got: Any, want: Any) -> None:
    there = jax.tree_util.tree_leaves_with_path(want)
    for (path, leaf), other in zip(there, jax.tree.leaves(got), strict=True):
        x, y = np.asarray(leaf), np.asarray(other)
        assert np.linalg.norm(x) > 0, path
        apart = np.linalg.norm(y - x) / np.linalg.norm(x)
        assert apart <= 2e-6, (jax.tree_util.keystr(path), apart)


@cache
def reference(count: int, size: int, microbatches: int) -> Gradients:
    """By autodiff; stages on fewer devices are the same stages in chunks."""
    flat = _reference(count, microbatches)

    def stacked(array: Any) -> Any:
        return array.reshape(count // size, size, *array.shape[2:])

    return dataclasses.replace(flat, weights=jax.tree.map(stacked, flat.weights))


@cache
def _reference(count: int, microbatches: int) -> Gradients:
    return jax.jit(by_autodiff)(*arguments(count, count, microbatches))


def placed(table: Schedule, weights: Any) -> Any:
    """Weights ``[chunks, stages, ...]`` of a loop, where a table has their stages."""

    def own(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[2:])[table.stage_numbers]

    return jax.tree.map(own, weights)


def check(table: Schedule, mesh: Mesh, *, recomputes: bool = False) -> None:
    """Everything that the loop gives under a table, beside autodiff."""
    sizes = table.virtual_stages, table.stages, table.microbatches
    weights, *others = arguments(*sizes)
    given = placed(table, weights), *others
    stages = stages_of(table.virtual_stages, recomputes=recomputes)
    pipeline = Pipeline(table, stages, mesh, "pp")

    def run(weights: Any, shared: Any, micros: Any) -> Gradients:
        return pipeline.gradients(
            weights, shared, micros, SEED, micro_gradients=FLOATS, keep_outputs=True
        )

    got = jax.jit(run)(*given)
    want = reference(*sizes)
    want = dataclasses.replace(want, weights=placed(table, want.weights))
    for name in ("loss", "statistics", "weights", "shared", "micros", "outputs"):
        close(getattr(got, name), getattr(want, name))
    own = got.weights[0]
    shards = own.sharding.shard_shape(own.shape)
    assert shards[1] == 1, "each device keeps its own stage's"


@pytest.mark.slow(reason="each schedule is compared with autodiff once")
@pytest.mark.parametrize(
    ("name", "size", "microbatches", "chunks", "recomputes"),
    [
        pytest.param("gpipe", 4, 6, 1, False, marks=pytest.mark.full),
        pytest.param("gpipe", 2, 3, 1, True, marks=pytest.mark.full),
        ("1f1b", 4, 2, 1, False),  # fewer microbatches than stages
        ("1f1b", 2, 4, 1, True),
        pytest.param("interleaved", 2, 6, 2, False, marks=pytest.mark.full),
        pytest.param("interleaved", 2, 4, 2, True, marks=pytest.mark.full),
        ("zero_bubble", 4, 6, 1, False),
        pytest.param("zero_bubble", 2, 3, 1, True, marks=pytest.mark.full),
        pytest.param("zero_bubble", 2, 1, 1, False, marks=pytest.mark.full),
        pytest.param("interleaved", 1, 3, 4, False, marks=pytest.mark.full),
        ("dualpipev", 2, 5, 2, False),
        pytest.param("dualpipev", 4, 8, 2, False, marks=pytest.mark.full),
        pytest.param("dualpipev", 2, 4, 2, True, marks=pytest.mark.full),
        pytest.param("dualpipev", 1, 3, 2, False, marks=pytest.mark.full),
    ],
)
def test_a_schedule_gives_what_autodiff_gives(
    name, size, microbatches, chunks, recomputes
):
    table = schedule(name, size, microbatches, chunks if chunks > 1 else None)
    check(table, mesh_of(pp=size), recomputes=recomputes)


@pytest.mark.full
def test_the_other_axes_of_the_mesh_split_what_stages_compute():
    check(schedule("zero_bubble", 2, 4), mesh_of(pp=2, fsdp=2, tp=2))


def any_table(
    seed: int,
    *,
    chunks: int,
    splits_backward: bool,
    placement: Placement = "loop",
    size: int = 2,
) -> Schedule:
    """A legal table of a few devices and three microbatches, of what came to mind."""
    pick, microbatches = random.Random(seed), 3
    last_stage = size * chunks - 1
    kinds = ("F", "B", "W") if splits_backward else ("F", "B")
    left = {(k, m, s) for k in kinds for m in range(3) for s in range(last_stage + 1)}
    done: set[tuple[str, int, int]] = set()
    rows = []
    while left:
        before, row = frozenset(done), []
        for device in range(size):
            cell = []
            for kind in kinds:
                ready = []
                for k, m, s in sorted(left):
                    goes_back = placement == "v" and s >= size
                    own = 2 * size - 1 - s if goes_back else s % size
                    if k != kind or own != device:
                        continue
                    needs = {
                        "F": s == 0 or ("F", m, s - 1) in before,
                        "B": ("F", m, s) in done
                        and (s == last_stage or ("B", m, s + 1) in before),
                        "W": ("B", m, s) in done,
                    }
                    ready += [(k, m, s)] if needs[kind] else []
                if ready and pick.random() < 0.7:
                    op = pick.choice(ready)
                    done.add(op)
                    left.remove(op)
                    cell.append(Op(op[0], op[1], op[2] // size))
            row.append(cell)
        rows.append(row)
    return custom(
        rows,
        microbatches=microbatches,
        chunks=chunks,
        splits_backward=splits_backward,
        placement=placement,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "splits_backward", "recomputes"),
    [(2, True, False), (3, True, False), (2, False, True), (3, False, False)],
)
@pytest.mark.parametrize("seed", [2, 5])
def test_so_does_any_table_whose_stages_turn_at_the_last_device(
    size, splits_backward, recomputes, seed
):
    sizes = {"chunks": 2, "size": size, "splits_backward": splits_backward}
    table = any_table(seed, placement="v", **sizes)
    check(table, mesh_of(pp=size), recomputes=recomputes)


@pytest.mark.full
@pytest.mark.parametrize(("seed", "splits_backward"), [(1, False), (3, True)])
def test_any_legal_table_gives_what_autodiff_gives(seed, splits_backward):
    table = any_table(seed, chunks=2, splits_backward=splits_backward)
    # Microbatches overtake each other, which they do in no table that has a name.
    firsts = [op.microbatch for _, d, op in table.placed() if (d, op.kind) == (0, "F")]
    assert firsts != sorted(firsts)
    check(table, mesh_of(pp=2))


# --- forward only


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "microbatches", "table"),
    # They are no multiples of the stages, with chunks and without. The table is not
    # read: it has as many microbatches as there are.
    [
        (4, 6, schedule("1f1b", 4, 4)),
        (2, 3, schedule("interleaved", 2, 2, 2)),
        (3, 4, schedule("dualpipev", 3, 6)),
        (1, 2, schedule("dualpipev", 1, 2)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_forward_only_gives_outputs_and_their_gradients(size, microbatches, table):
    count = table.virtual_stages
    weights, *others = arguments(count, size, microbatches)
    given = placed(table, weights), *others
    pipeline = Pipeline(table, stages_of(count), mesh_of(pp=size), "pp")

    def loss(weights: Any, shared: Any, floats: Any, label: Any) -> Any:
        micros = {**floats, "label": label}
        outputs, total, statistics = pipeline.outputs(weights, shared, micros)
        return SEED * total, (outputs, total, statistics)

    weights, shared, micros = given
    label = micros.pop("label")
    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    (own, of_shared, of_micros), more = run(weights, shared, micros, label)
    want = reference(count, size, microbatches)
    close(more, (want.outputs, want.loss, want.statistics))
    close((own, of_shared), (placed(table, want.weights), want.shared))
    close([of_micros[k] for k in sorted(of_micros)], list(want.micros.values()))


# --- the program


@cache
def compiled(name: str, microbatches: int) -> Any:
    """Two stages whose wires are large beside their weights."""
    table = schedule(name, 2, microbatches)
    rows, width = 1024, 16

    def run(weights: Any, _: Any, wire: Any, micro: Any, index: Any) -> Any:
        x = jax.lax.cond(
            index == 0, lambda: micro[:, None] * jnp.ones(width), lambda: wire
        )
        x = x + jnp.tanh(x @ weights)
        loss = jax.lax.cond(
            index == 1, lambda: jnp.square(x).sum(), lambda: jnp.float32(0.0)
        )
        return x, loss, ((), ())

    stages = Stages([run], jax.ShapeDtypeStruct((rows, width), jnp.float32))
    pipeline = Pipeline(table, stages, mesh_of(pp=2), "pp")
    weights = jnp.ones((table.chunks, 2, width, width))
    step = jax.jit(lambda w, micros: pipeline.gradients(w, (), micros, SEED).weights)
    return step.lower(weights, jnp.ones((microbatches, rows))).compile()


def temporaries(name: str, microbatches: int) -> int:
    return compiled(name, microbatches).memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_memory_of_1f1b_does_not_grow_with_microbatches_and_is_below_gpipe():
    few, many = temporaries("1f1b", 8), temporaries("1f1b", 64)
    assert many <= 1.02 * few
    wire = 1024 * 16 * 4
    assert temporaries("gpipe", 8) - few >= 5 * wire
    assert temporaries("gpipe", 64) - many >= 61 * wire


@pytest.mark.parametrize(
    "name", cases(["gpipe", "1f1b", "zero_bubble"], "gpipe", "1f1b")
)
def test_the_program_is_no_longer_for_more_microbatches(name):
    sizes = []
    for microbatches in (8, 64):
        module = hlo.parse(compiled(name, microbatches).as_text())
        sizes.append(
            sum(len(part.instructions) for part in module.computations.values())
        )
    assert sizes[0] == sizes[1] > 100


@pytest.mark.parametrize(
    "name", cases(["gpipe", "1f1b", "zero_bubble"], "gpipe", "1f1b")
)
@pytest.mark.parametrize("microbatches", [8, 64])
def test_each_tick_sends_one_wire_in_each_direction_that_it_works_in(
    name, microbatches
):
    ledger = collectives(compiled(name, microbatches), mesh_of(pp=2))
    sent = [row for row in ledger.rows if row.kind == "collective-permute"]
    assert [row.axes for row in sent] == [("pp",)] * 2
    assert [row.conditional for row in sent] == [False] * 2
    assert [row.nbytes for row in sent] == [1024 * 16 * 4] * 2
    ticks = schedule(name, 2, microbatches).ticks
    # Under gpipe all forwards come first, and nothing is sent back among them.
    calls = ticks // 2 if name == "gpipe" else ticks
    assert [row.calls for row in sent] == [calls] * 2


def test_each_tick_of_a_v_sends_both_ways():
    ledger = collectives(compiled("dualpipev", 8), mesh_of(pp=2))
    sent = [row for row in ledger.rows if row.kind == "collective-permute"]
    assert [row.conditional for row in sent] == [False] * len(sent)
    assert sum(row.nbytes for row in sent) == 4 * 1024 * 16 * 4
    assert {row.calls for row in sent} == {schedule("dualpipev", 2, 8).ticks}


@pytest.mark.parametrize(("name", "share"), [("gpipe", 1.0), ("1f1b", 9 / 10)])
@pytest.mark.usefixtures("compiled_here")  # for its name scopes
def test_the_timeline_has_each_kind_of_work_in_the_ticks_of_the_table(name, share):
    mesh = Mesh(["pp"], shape=(2,), target="cpu:2")
    module = hlo.parse(compiled.__wrapped__(name, 8).as_text())
    steps = TimedSteps(module, mesh, mesh.target).steps
    inside = [step for loop in steps if isinstance(loop, Loop) for step in loop.body]
    works = [step for step in inside if isinstance(step, Branch)]
    assert all(step.is_known for step in works)
    assert {max(share for share, _ in step.parts) for step in works} == {share}
