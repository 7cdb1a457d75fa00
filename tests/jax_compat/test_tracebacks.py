# SPDX-License-Identifier: Apache-2.0
"""A user's mistake shows the user's frames and one of Tessera's."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.errors import TesseraError
from tessera.jax_compat.tracebacks import at_boundary

X = jnp.ones((8, 4))
HERE = "test_tracebacks.py"


def mismatched(x):
    return x @ x


def refused(x):
    return op.flash_attention(x, x, x)


def raising(x):
    raise KeyError(x.shape)


def frames_of(call, *args):
    """The files and functions of an error's frames, this one's left out."""
    with pytest.raises((TypeError, ValueError, KeyError, AssertionError)) as caught:
        call(*args)
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    return [(Path(frame.filename).name, frame.name) for frame in frames]


def on_a_kernel(body):
    kernel = op.kernel(lambda x: body(x))
    with dist.Mesh(["dp"]):
        return kernel(X)


CALLS = {
    "function.py": {
        "__call__": lambda body: ts.function(body)(X),
        "trace": lambda body: ts.function(body).trace(X),
        "compile": lambda body: ts.function(body).compile(X),
    },
    "training_steps.py": {
        "init": lambda body: graph.training_step(body).init(jax.random.key(0), X)
    },
    "value_and_grad.py": {
        "gradient": lambda body: ts.grad(body)(X),
        "with_gradient": lambda body: ts.value_and_grad(body)(X),
    },
    "kernel.py": {"__call__": on_a_kernel},
    "explain.py": {"trace": lambda body: graph.trace(body, X)},
    "compare_layouts.py": {
        "compare_layouts": lambda body: ts.compare_layouts(
            ts.function(body), X, dist.Mesh(["dp"])
        )
    },
}


@pytest.mark.parametrize("body", [mismatched, refused, raising])
@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file, calls in CALLS.items() for name in calls]
)
def test_a_mistake_in_a_body(file, name, body):
    frames = frames_of(CALLS[file][name], body)
    assert [frame for frame in frames if frame[0] != HERE] == [(file, name)]
    assert frames[-1] == (HERE, body.__name__)


def test_a_mistake_in_a_branch_and_what_it_was_raised_from():
    @ts.function
    def step(x):
        if x.sum() > 0:
            x = raising(x)
        return x

    with pytest.raises(TesseraError) as caught:
        step(X)
    for error in (caught.value, caught.value.__cause__):
        names = {
            Path(f.filename).name for f in traceback.extract_tb(error.__traceback__)
        }
        assert names <= {HERE, "function.py"}


@pytest.mark.parametrize(
    ("declare", "frame"),
    [
        (lambda: ts.function(mismatched, skip_passes=["x"]), ("jit.py", "function")),
        (lambda: dist.tensor((-1,)), ("shard.py", "tensor")),
        (
            lambda: graph.training_step(mismatched, mesh=3),
            ("training_steps.py", "training_step"),
        ),
    ],
)
def test_a_mistake_in_a_declaration(declare, frame):
    assert frames_of(declare) == [(HERE, "<lambda>"), frame]


def test_a_bug_of_tessera_keeps_its_frames(monkeypatch):
    monkeypatch.setattr("tessera.jax_compat.tracebacks.OWN_FILES", (__file__,))

    @at_boundary
    def broken():
        assert not X.shape

    assert [name for _, name in frames_of(broken)] == ["bounded", "broken"]


def test_all_frames_are_kept_where_asked():
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert len(frames_of(ts.function(mismatched), X)) > 10
    finally:
        jax.config.update("jax_traceback_filtering", before)
