# SPDX-License-Identifier: Apache-2.0
"""A call that compiles again says why, once; one that finds a program says nothing."""

import logging
import re
import sys
import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def said(caplog):
    """The lines of what was logged since the last look, without the first of each."""

    def look():
        records = [r for r in caplog.records if r.name == "tessera.recompiles"]
        lines = [r.getMessage().split("\n  ")[1:] for r in records]
        caplog.clear()
        return [line for message in lines for line in message]

    return look


def pair(x, y):
    return x, y


# --- an argument that did not change is not named


def test_only_the_argument_that_changed_is_named(said):
    step = ts.function(lambda a, b, c: (a, b, c))
    step(X, {"u": X, "v": X}, X)
    step(X, {"u": X, "v": X[:4]}, X)
    assert said() == ["shape of 'b/v': (4,), before (8,)"]


def test_an_array_that_the_step_places_is_like_a_placed_one(dp_mesh, said):
    step = ts.function(pair, mesh=dp_mesh)
    step(X, X)
    placed = jax.device_put(X, NamedSharding(dp_mesh.jax, P()))
    split = jax.device_put(X, NamedSharding(dp_mesh.jax, P("dp")))
    step(placed, X)
    assert said() == []
    step(placed, split)
    assert said()[0] == "layout of 'y': P('dp',), before P() (uncommitted)"


def test_an_uncommitted_array_is_not_named_for_the_mesh_of_another(dp_mesh, said):
    step = ts.function(pair)
    step(X, X)
    step(X, jax.device_put(X, NamedSharding(dp_mesh.jax, P())))
    assert said()[0].startswith("layout of 'y': P() on Mesh(dp=8")


def test_a_call_is_compared_with_the_closest_program_not_the_last_one(said):
    step = ts.function(pair)
    step(X, X)
    step(X[:4], X[:4])
    said()
    step(X, X.astype(np.int32))
    assert said() == ["dtype of 'y': int32, before float32"]


def test_the_same_array_in_another_thread_is_named_once(caplog):
    step = ts.function(lambda x: x + 1)
    step(X)
    start = threading.Barrier(4)

    def call():
        start.wait()
        step(X[:4])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1


# --- how it is said


def test_the_message_names_the_function_the_program_and_the_line(caplog):
    @ts.function
    def scaled(x):
        return x * 2

    scaled(X)
    line = sys._getframe().f_lineno + 1
    scaled(X[:4])
    assert caplog.messages == [
        "'scaled' compiles again, program 2, for the call at "
        f"tests/graph/test_recompilations.py:{line}\n"
        "  shape of 'x': (4,), before (8,)"
    ]


def test_a_user_switches_it_off_as_any_logger(caplog):
    step = ts.function(lambda x: x + 1)
    with caplog.at_level(logging.ERROR, "tessera.recompiles"):
        step(X)
        step(X[:4])
    assert caplog.records == []


def test_many_shapes_are_said_as_often_as_the_number_of_programs_doubles(caplog, said):
    step = ts.function(lambda x: x + 1)
    for size in range(1, 9):
        step(X[:size])
    numbers = [re.findall(r"program (\d+)", r.getMessage()) for r in caplog.records]
    assert numbers == [["2"], ["4"], ["8"]]
    assert said()[::2] == [
        "shape of 'x': (2,), before (1,)",
        "shape of 'x': (8,), before (7,)",
    ]


def test_a_number_that_becomes_an_array_says_what_to_begin_with(said):
    step = ts.function(lambda state: {"step": state["step"] + 1})
    step(step({"step": 0}))
    (_, fix) = said()
    assert "pass 'state/step' as an array, jnp.asarray(x), from the first call" in fix


def test_another_reason_for_the_same_argument_is_said(said):
    step = ts.function(lambda x: x + 1)
    for x in (X, X[:4], X[:2], X.astype(np.int32), X[:4].astype(np.int32)):
        step(x)
    assert said() == [
        "shape of 'x': (4,), before (8,)",
        "dtype of 'x': int32, before float32",
    ]


def test_what_is_alike_is_one_line_and_a_long_list_ends(said):
    step = ts.function(lambda tree: tree)
    names = [f"w{number}" for number in range(8)]
    step(dict.fromkeys(names, X))
    step(dict.fromkeys(names, X[:4]))
    assert said() == [
        "shape of 'tree/w0', 'tree/w1', 'tree/w2' and 5 more: (4,), before (8,)"
    ]
    step = ts.function(lambda tree: tree)
    step(dict.fromkeys(names, X))
    step({name: np.ones(number) for number, name in enumerate(names)})
    assert said()[4:] == [
        "shape of 'tree/w4': (4,), before (8,)",
        "and 3 more differences",
    ]


def test_a_program_that_is_compiled_on_purpose_is_no_reason(said):
    step = ts.function(lambda x: x + 1)
    for size in (8, 4):
        step.compile(jax.ShapeDtypeStruct((size,), jnp.float32))
    step(X)
    assert said() == []
    step(X[:2])
    assert said() == ["shape of 'x': (2,), before (4,)"]


def test_a_function_inside_another_one_says_nothing(said):
    inner = ts.function(lambda x: x + 1)
    outer = ts.function(lambda x, y: inner(x) + inner(y).sum())
    outer(X, X[:4])
    assert said() == []


# --- a state that comes back in another layout


def settle(step, state):
    for _ in range(3):
        state = step(state, X)
    return step.num_programs()


def test_a_state_without_a_spec_compiles_again_and_the_advice_helps(dp_mesh, said):
    def body(state, x):
        return {"w": state["w"] - x}

    state = {"w": np.ones(8, np.float32)}
    specs = {"x": P("dp")}
    assert settle(ts.function(body, mesh=dp_mesh, in_specs=specs), state) == 2
    assert said() == [
        "layout of 'state/w': P('dp',), before P() (uncommitted)",
        "fix: declare the layout of 'state' in in_specs, and in out_specs where it "
        "comes back",
        "fix: or place it before the first call: "
        "jax.device_put(x, NamedSharding(mesh.jax, P('dp',)))",
    ]
    declared = ts.function(
        body,
        mesh=dp_mesh,
        in_specs={**specs, "state": P("dp")},
        out_specs=P("dp"),
    )
    assert settle(declared, state) == 1
    placed = jax.device_put(state, NamedSharding(dp_mesh.jax, P("dp")))
    assert settle(ts.function(body, mesh=dp_mesh, in_specs=specs), placed) == 1
    assert said() == []


def test_a_training_step_says_it_too(dp_mesh, said):
    @graph.training_step(mesh=dp_mesh)
    def step(x):
        return x * 2

    step(X)
    step(np.stack([X, X], axis=1))
    assert said() == ["shape of 'x': (8, 2), before (8,)"]


# --- values, structures, settings


@dataclass(frozen=True)
class Settings:
    rate: float


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (
            0.1,
            0.2,
            [
                "static value of 'v': 0.2, before 0.1",
                "fix: pass 'v' as an array, jnp.asarray(x), from the first call on: "
                "a number of Python is a part of the program, and each compiles one",
            ],
        ),
        (True, False, ["static value of 'v': False, before True"]),
        (
            {"settings": Settings(0.1)},
            {"settings": Settings(0.2)},
            [
                "static value of 'v/settings': Settings(rate=0.2), "
                "before Settings(rate=0.1)"
            ],
        ),
        pytest.param(
            object(),
            object(),
            [
                "static value of 'v': <object object>, before another one",
                "fix: create 'v' once, before the calls",
            ],
            id="objects",  # whose own text has their addresses
        ),
        (1, X, ["static value of 'v': an array, float32[8], before 1"]),
        ([X], [X, X], ["structure of 'v': with v/1, before without"]),
        ({"a": X}, {"b": X}, ["structure of 'v': with v/b, before with v/a"]),
        (
            [X],
            (X,),
            ["structure of 'v': PyTreeDef((*,)), before PyTreeDef([*])"],
        ),
        (
            jnp.asarray(1.0),
            jnp.float32(1.0),
            [
                "weak type of 'v': False, before True",
                "fix: give 'v' a dtype from the first call on: jnp.asarray(x, dtype)",
            ],
        ),
    ],
    ids=str,
)
def test_what_changed_is_named(said, before, now, lines):
    step = ts.function(lambda x, v: x + 1)
    step(X, before)
    step(X, now)
    assert said() == lines


def test_a_value_that_cannot_be_shown_does_not_stop_the_call(said):
    class Unshown:
        def __repr__(self):
            raise ValueError("no")

    step = ts.function(lambda x, v: x + 1)
    step(X, Unshown())
    step(X, Unshown())
    assert said()[0] == "static value of 'v': <Unshown instance>, before another one"


def test_another_way_of_passing_arguments(said):
    step = ts.function(pair)
    step(X, X)
    step(X, y=X)
    assert said() == ["way of passing: 1 by position, y by name, before 2 by position"]


def test_another_context(dp_mesh, said):
    step = ts.function(lambda x: x + 1)
    step(X)
    with ts.autocast("bf16"):
        step(X)
    assert said() == ["autocast: bfloat16, before None"]
    with jax.default_matmul_precision("highest"):
        step(X)
    assert said() == ["jax_default_matmul_precision: highest, before None"]
    with dp_mesh:
        step(X)
    (line,) = said()
    assert line.startswith("mesh: Mesh(dp=8")


def test_another_mesh_of_jax(said):
    step = ts.function(lambda x: x + 1)
    step(X)
    with jax.set_mesh(jax.make_mesh((8,), ("i",))):
        step(X)
    (line,) = said()
    assert line.startswith("mesh: Mesh(")
    assert line.endswith(", before None")


def test_an_object_in_another_mode(said):
    model = nnx.Sequential(*(nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2)))
    step = ts.function(lambda model, x: model(x))
    step(model, jnp.ones(8))
    model.eval()
    step(model, jnp.ones(8))
    assert said() == ["attribute 'deterministic' of 'model': True, before False"]
