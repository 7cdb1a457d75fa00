# SPDX-License-Identifier: Apache-2.0
"""What avoids an unplanned collective: whoever follows it has a program without it."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.analysis.ledger import collectives

# What was compiled elsewhere has the lines of elsewhere.
pytestmark = pytest.mark.usefixtures("compiled_here")


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ledger(body, mesh, *arguments, out=None, **specs):
    step = ts.function(body, mesh=mesh, in_specs=specs, out_specs=out)
    return step.compile(*arguments).collectives


def constrained(x, mesh, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh.jax, P(*spec)))


def loss(params, x):
    return jnp.sum((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def sgd(params, x):
    gradient = jax.grad(loss)(params, x)
    return {k: params[k] - 0.1 * gradient[k] for k in params}


PARAMS = {"up": f32(64, 256), "down": f32(256, 64)}
MEGATRON = {"up": P(None, "tp"), "down": P("tp")}


@pytest.mark.parametrize("missing", ["up", "down"])
def test_a_forgotten_spec_is_named_and_declaring_it_saves_what_is_said(
    grid_mesh, missing
):
    def ledger_of(specs):
        call = sgd, grid_mesh, PARAMS, f32(32, 64)
        return ledger(*call, params=specs, x=P("dp"), out=specs)

    found = ledger_of({**MEGATRON, missing: P()})
    (advice,) = [row.advice for row in found.unplanned]
    assert (advice.where, advice.names) == ("result", (f"result/{missing}",))
    assert advice.spec == MEGATRON[missing]
    followed = ledger_of({**MEGATRON, missing: advice.spec})
    assert not followed.unplanned
    assert found.total_bytes - followed.total_bytes == advice.saved_bytes


def test_results_that_are_gathered_alike_are_one_line(grid_mesh):
    def many(layers, x):
        return [sgd(params, x) for params in layers]

    specs = [{**MEGATRON, "down": P()}] * 5
    call = many, grid_mesh, [PARAMS] * 5, f32(32, 64)
    found = ledger(*call, layers=specs, x=P("dp"), out=specs)
    text = " ".join(found.summary().split())
    assert len(found.unplanned) == 5
    assert re.search(
        r"test_unplanned_advice.py:\d+: declare P\('tp',\) for result/0/down, "
        r"result/1/down, result/2/down and 2 more in out_specs, and in in_specs where "
        r"it comes back; saves 320 KiB per step over tp",
        text,
    )
    (row,) = [line for line in found.as_text().splitlines() if "UNPLANNED  " in line]
    assert row.split()[3:8] == ["5", "×", "1", "320", "KiB"]


def test_an_argument_that_is_only_read_whole_is_to_be_declared_whole(grid_mesh):
    def body(w, x):
        return x @ jnp.fft.fft(w).real

    call = body, grid_mesh, f32(64, 64), f32(8, 64)
    found = ledger(*call, w=P(None, "tp"), x=P("dp"))
    (row,) = found.unplanned
    assert (row.advice.where, row.advice.names) == ("argument", ("w",))
    followed = ledger(*call, w=row.advice.spec, x=P("dp"))
    assert followed.rows == ()
    assert row.advice.saved_bytes == found.total_bytes
    assert "declare P() for w in in_specs" in found.summary()


def test_a_full_rematerialization_is_avoided_by_the_layout_in_between(grid_mesh):
    def body(x, *between):
        y = jnp.sin(x)
        for spec in between:
            y = constrained(y, grid_mesh, *spec)
        return jnp.cos(constrained(y, grid_mesh, None, "dp"))

    call = f32(16, 32)
    found = ledger(body, grid_mesh, call, x=P("tp"), out=P(None, "dp"))
    (row,) = found.unplanned
    assert row.copies_whole
    assert (row.advice.where, row.advice.spec) == ("value", P("tp", "dp"))
    assert "jax.lax.with_sharding_constraint(x, NamedSharding" in found.summary()
    followed = ledger(
        lambda x: body(x, row.advice.spec),
        grid_mesh,
        call,
        x=P("tp"),
        out=P(None, "dp"),
    )
    assert not followed.unplanned
    assert found.total_bytes - followed.total_bytes == row.advice.saved_bytes


@pytest.mark.parametrize(
    ("out", "advised"),
    [((P("tp"), P("tp")), []), ((P("dp"), P("tp")), ["result/0", "result/1"])],
    ids=str,
)
def test_a_transposed_square_result_gets_a_layout_that_helps_or_none(
    grid_mesh, out, advised
):
    def body(w):
        y = jnp.sin(w)
        return y, y.T

    found = ledger(body, grid_mesh, f32(64, 64), w=P("tp"), out=out)
    assert found.unplanned
    advice = [row.advice for row in found.unplanned if row.advice is not None]
    assert [one.names for one in advice] == [(name,) for name in advised]
    for index, one in enumerate(advice):
        changed = (*out[:index], one.spec, *out[index + 1 :])
        again = ledger(body, grid_mesh, f32(64, 64), w=P("tp"), out=changed)
        assert len(again.unplanned) < len(found.unplanned)


def test_what_is_not_known_is_not_said(grid_mesh):
    """Two matmuls split along the wrong dim: either may be the one that is meant."""
    specs = {**MEGATRON, "down": P(None, "tp")}
    found = ledger(
        sgd, grid_mesh, PARAMS, f32(32, 64), params=specs, x=P("dp"), out=specs
    )
    assert [row.advice for row in found.unplanned] == [None]
    assert "\nUNPLANNED: 1 that no declared layout implies\nsliced" in found.summary()


def test_a_result_that_is_read_inside_too_would_still_be_gathered(grid_mesh):
    def body(a):
        y = jnp.sin(a)
        return y, jnp.fft.fft(y).real

    found = ledger(body, grid_mesh, f32(64, 64), a=P(None, "tp"), out=(P(), P()))
    assert [row.advice for row in found.unplanned] == [None]


def test_an_argument_that_is_read_in_parts_too_stays_split(grid_mesh):
    def body(a):
        return jnp.cos(a), jnp.fft.fft(a).real

    out = (P(None, "tp"), P())
    found = ledger(body, grid_mesh, f32(64, 64), a=P(None, "tp"), out=out)
    assert [row.advice for row in found.unplanned] == [None]


COMBINED = """HloModule step, num_partitions=8
ENTRY main {
  a = f32[64,8] parameter(0)
  b = f32[64,8,8] parameter(1)
  x = f32[16,8] dot(a, a)
  y = f32[16,8,8] dot(b, b)
  s = ((f32[16,8], f32[16,8,8]), (f32[64,8], f32[64,8,8])) all-gather-start(x, y),
    replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(step)/dot"}
  d = (f32[64,8], f32[64,8,8]) all-gather-done(s)
  v = f32[64,8] get-tuple-element(d), index=0
  w = f32[64,8,8] get-tuple-element(d), index=1
  u = f32[64,8,8] transpose(w), dimensions={0,2,1}
  ROOT r = (f32[64,8], f32[64,8,8]) tuple(v, OUT)
}""".replace(",\n   ", ",")


@pytest.mark.parametrize(("out", "names"), [("w", ("v", "w")), ("u", ())])
def test_results_that_are_gathered_together_are_named_if_all_are_known(
    grid_mesh, out, names
):
    whole = [NamedSharding(grid_mesh.jax, P())] * 2
    program = SimpleNamespace(
        as_text=lambda: COMBINED.replace("OUT", out),
        input_shardings=whole,
        output_shardings=whole,
    )
    (row,) = collectives(program, grid_mesh, names=(["a", "b"], ["v", "w"])).rows
    assert len(row.arrays) == 2
    assert not row.is_planned
    assert (row.advice.names if row.advice else ()) == names
    assert row.advice is None or row.advice.spec == P("tp")
