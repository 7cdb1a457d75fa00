# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's users type by reflex is an error that says what to type."""

import jax.numpy as jnp
import pytest

import tessera as ts
from tessera.errors import OperandError

X = jnp.ones((4, 8))


@pytest.mark.parametrize(
    ("method", "fix"),
    [
        (lambda x: x.to("cuda"), "arguments are moved to the step's devices"),
        (lambda x: x.float(), "x.astype(ts.bf16)"),
        (lambda x: x.sum().backward(), "ts.grad(loss, weights)"),
        (lambda x: x.detach(), "jax.lax.stop_gradient(x)"),
        (lambda x: x.view(2, 16), "x.reshape(...)"),
        (lambda x: x.unsqueeze(0), "jnp.expand_dims(x, 1)"),
        (lambda x: x.exp(), "jnp.exp(x, ...)"),
        (lambda x: x.relu(), "jax.nn.relu(x, ...)"),
    ],
)
def test_a_method_of_a_tensor_says_what_arrays_have(method, fix):
    with pytest.raises(OperandError, match="arrays have no method") as caught:
        ts.function(method)(X)
    assert fix in caught.value.fix


def test_another_attribute_error_stays():
    class Model:
        pass

    for body in (lambda x: x.not_a_method(), lambda x: Model().to(x)):
        with pytest.raises(AttributeError):
            ts.function(body)(X)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("cuda", r"jax\.devices\(\)"),
        ("optim", "optax"),
        ("compile", r"ts\.function"),
        ("save", r"tessera\.train\.save_checkpoint"),
        ("manual_seed", r"jax\.random"),
    ],
)
def test_a_name_of_the_module_torch_says_what_to_use(name, instead):
    assert not hasattr(ts, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use {instead}"):
        getattr(ts, name)
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        ts.no_such_name  # noqa: B018
