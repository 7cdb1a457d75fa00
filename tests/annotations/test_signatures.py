# SPDX-License-Identifier: Apache-2.0
"""What a function calls its arguments, behind wrappers."""

import functools

import jax

from tessera.annotations import argument_names, own_signature, signature_of


def scaled(x, factor=2, *more, bias=None): ...


class Model:
    @functools.lru_cache  # noqa: B019 - a wrapper of a method
    def apply(self, x): ...

    def __call__(self, y): ...


def names(function, count=2):
    return argument_names(signature_of(function), count)


def test_positional_arguments_have_the_names_of_parameters():
    assert names(scaled) == ["x", "factor"]
    assert names(functools.partial(scaled, 1)) == ["factor", "args[1]"]
    assert names(Model(), 1) == ["y"]


def test_arguments_beyond_the_named_ones_are_numbered():
    assert names(scaled, 4) == ["x", "factor", "args[2]", "args[3]"]


def test_a_wrapper_that_passes_calls_on_has_the_names_of_what_it_wraps():
    assert names(jax.vmap(scaled)) == names(jax.jit(jax.vmap(scaled))) == names(scaled)

    @functools.wraps(Model.__call__)
    def method(*args): ...

    assert names(method) == ["self", "y"]
    assert names(method.__get__(Model()), 1) == ["y"]


def test_a_wrapper_with_parameters_of_its_own_has_their_names():
    @functools.wraps(scaled)
    def with_key(key, *args, **kwargs): ...

    assert names(with_key) == ["key", "args[1]"]


def test_what_does_not_say_takes_anything():
    assert str(own_signature(type)) == "(*args, **kwargs)"
    assert names(max) == ["args[0]", "args[1]"]
