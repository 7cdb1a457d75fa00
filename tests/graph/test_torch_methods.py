# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's users type by reflex is an error that says what to type."""

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera.errors import ControlFlowError, OperandError

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
        (lambda x: x.view(-1), "x.reshape(...)"),
        (lambda x: x.size(0), "x.shape[0]"),
        (lambda x: x.flatten(1), "x.reshape(x.shape[0], -1)"),
        (lambda x: x.add_(1), "x = x + y"),
        (lambda x: x.clamp_(0, 1), "x.at[0].set(y)"),
        (lambda x: x.numel(), "x.size"),
        (lambda x: x.cuda(), "arguments are moved"),
        (lambda x: x.grad, "ts.grad(loss, weights)"),
        # JAX's own takes how many parts there are, and PyTorch's how large one is.
        (lambda x: x.split(2), "where 2 is how many parts"),
    ],
)
def test_a_method_of_a_tensor_says_what_arrays_have(method, fix):
    with pytest.raises(OperandError, match="arrays have no method") as caught:
        ts.function(method)(X)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("method", "fix"),
    [
        (lambda x: x.sum(dim=1), "axis="),
        (lambda x: x.max(1, keepdim=True), "keepdims="),
        (lambda x: jax.nn.softmax(x, dim=-1), "axis="),
        # PyTorch's divides by one less.
        (lambda x: x.std(dim=0), "axis= and ddof=1, which is PyTorch's default"),
        (lambda x: x.var(0, unbiased=False), "or ddof=0"),
    ],
)
def test_a_keyword_of_pytorch_says_that_of_jax(method, fix):
    with pytest.raises(OperandError, match="has no keyword") as caught:
        ts.function(method)(X)
    assert fix in caught.value.fix


def own(x, axis):
    return x.sum(axis)


def test_an_error_that_is_not_of_jax_stays():
    for body in (
        lambda x: own(x, dim=1),
        lambda x: len(x)(),
        lambda x: int("x.size()"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            ts.function(body)(X)
        assert not isinstance(caught.value, OperandError)


def test_the_number_of_an_array_is_not_asked_for_in_a_step():
    with pytest.raises(ControlFlowError, match=r"leave out x\.item\(\)"):
        ts.function(lambda x: x.sum().item())(X)


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
        ("pmap", r"ts\.distribute"),
        ("scan", r"jax\.lax\.scan"),
        ("vmap", r"jax\.vmap"),
        ("zeros", r"jax\.numpy\.zeros"),
    ],
)
def test_a_name_of_the_module_torch_says_what_to_use(name, instead):
    assert not hasattr(ts, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use {instead}"):
        getattr(ts, name)
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        ts.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dist.get_rank", r"jax\.process_index\(\)"),
        ("dist.get_world_size", r"jax\.device_count\(\)"),
        ("dist.barrier", "nothing"),
        ("dist.reduce", r"dist\.all_reduce"),
        ("distributed.init_process_group", "joined"),
        ("dist.ReduceOp", "op='sum'"),
        ("amp.GradScaler", r"ts\.amp\.LossScale"),
    ],
)
def test_a_name_of_a_part_of_torch_says_what_to_use(name, instead):
    module, name = name.split(".")
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use .*{instead}"):
        getattr(getattr(ts, module), name)
