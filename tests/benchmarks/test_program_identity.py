# SPDX-License-Identifier: Apache-2.0
"""The trainer's step is, operation by operation, that of the same step by hand."""

import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
# As users compile: the older emitters that tests use order a tuple in two ways.
IS_OLD = jax.__version_info__[:2] == (0, 10)
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if IS_OLD else None


@pytest.fixture(scope="module")
def identity():
    """The benchmark, for a batch that compiles quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        before = set(sys.modules)
        module = importlib.import_module("program_identity")
        patch.setattr(module, "ROWS", 8)
        patch.setattr(module, "LENGTH", 16)
        yield module
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if Path(file).parent == FOLDER:
                del sys.modules[name]


@pytest.mark.full
def test_a_step_without_backend_passes_is_the_program_by_hand(identity):
    step, _, by_hand, arguments = identity.steps("fsdp×tp")
    compiled_step = step.trace(*arguments).lower().compile(EMITTERS)
    ours = identity.canonical(compiled_step.jax)
    theirs = identity.canonical(by_hand.lower(*arguments).compile(EMITTERS))
    assert identity.differing(ours, theirs) == {}
    assert ours == theirs
    assert identity.operations(ours).total() > 1000


def compiled(function, **options):
    return jax.jit(function, **options).lower(jnp.ones((4, 4))).compile()


def test_names_do_not_count_and_everything_else_does(identity):
    def first(x):
        return jnp.sum(jnp.tanh(x) * 0.1, axis=0)

    def second(y):
        with jax.named_scope("elsewhere"):
            return jnp.sum(jnp.tanh(y) * 0.1, axis=0)

    def third(x):
        return jnp.sum(jnp.tanh(x) * 0.2, axis=0)

    text = identity.canonical(compiled(first))
    assert text == identity.canonical(compiled(second))
    other = identity.canonical(compiled(third))
    assert text != other
    assert re.sub(r"0\.2", "0.1", other) == text
    assert identity.differing(text, other) == {}

    def same(x):
        return x * 2.0

    kept = identity.canonical(compiled(same))
    assert kept != identity.canonical(compiled(same, donate_argnums=0))


def test_operations_that_differ_are_counted(identity):
    texts = [
        identity.canonical(compiled(function))
        for function in (lambda x: x @ x, lambda x: x @ x @ x)
    ]
    apart = identity.differing(*texts)
    assert apart["dot f32[4,4]{1,0}"] == (1, 2)
