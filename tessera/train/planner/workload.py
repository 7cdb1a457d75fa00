# SPDX-License-Identifier: Apache-2.0
"""``Workload``: what a training step computes, whatever devices it is spread over.

It is read from the traced loss of one sequence, and of its gradient under each policy
of rematerialization, so it holds for every model that the trainer trains.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from tessera.foundations.tree import named_leaves
from tessera.mesh import Mesh
from tessera.targets.target import Target
from tessera.tracing import scope
from tessera.tracing.scope import Scope
from tessera.train.config.layout_checks import build_model
from tessera.train.config.post_training_config import NEXT_TOKEN
from tessera.train.config.run_config import Config
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.models.model import Model
from tessera.train.planner.matmuls import Lookup, Product, TracedCosts, Weight
from tessera.train.planner.traced_matmuls import find_products

_BATCH: Final = ("tokens", "targets", "segment_ids", "positions")
# The second number of sequences that is traced: blocks of attention depend on it.
_ROWS: Final = 4
# Bytes of a number of a parameter where it is traced.
_TRACED: Final = 4
_STACKED: Final = ("layers", "stages")


@dataclass(frozen=True)
class Parameter:
    """An array of the model.

    Attributes:
      path: Its name in the tree.
      shape: Global shape.
      names: The logical name of each dim.
      itemsize: Bytes of a number, as it is stored; quantized ones with their scales.
      is_trained: Whether it has a gradient.
      is_layered: Whether the layers of the model each have a part of it.
      state_bytes: What the optimizer keeps for each scalar; 0 if it is not trained.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    itemsize: float
    is_trained: bool
    is_layered: bool
    state_bytes: float

    @property
    def size(self) -> int:
        """Scalars."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Recomputed:
    """What a backward pass computes again, for one sequence, and what is kept for it.

    Attributes:
      products: Share of the products of layers.
      inner_flops: FLOPs of products of activations.
      kept_bytes: Results that layers keep from the forward pass.
      operations: Operations that a microbatch starts, forward and backward.
      operations_of_row: More of them for each further sequence of a microbatch.
    """

    products: float
    inner_flops: float
    kept_bytes: float = 0.0
    operations: float = 0.0
    operations_of_row: float = 0.0


LEAST: Final = "least"
"""A policy below all others: keeps nothing, computes again what each of them does."""


@dataclass(frozen=True)
class Workload:
    """What one sequence costs in each part of a training step.

    Attributes:
      sequence_length: Tokens of a sequence.
      num_layers: Blocks that repeat.
      matmul_dtype: NumPy's name of the dtype of the operands of matmuls; ``float8``
        where it is that of products with parameters in layers, and of others bfloat16.
      reduced_itemsize: Bytes of a number of a gradient that devices add up.
      parameters: The arrays of the model.
      products: Matmuls with parameters in the forward pass.
      lookups: Rows of parameters in the forward pass.
      inner_flops: FLOPs of matmuls of activations in the forward pass.
      inner_bytes: What they read and write outside of kernels.
      inner_backward: Factor of these two in the backward pass.
      reduced_bytes: What norms and other reductions read in the forward pass.
      other_flops: Operations beside matmuls in the forward pass.
      ends_again: How often the backward pass computes the logits again: chunks keep
        none where log-probabilities, and not their sum, are asked for.
      recomputed: By policy of rematerialization, with ``LEAST``.
    """

    sequence_length: int
    num_layers: int
    matmul_dtype: str
    reduced_itemsize: int
    parameters: tuple[Parameter, ...]
    products: tuple[Product, ...]
    lookups: tuple[Lookup, ...]
    inner_flops: float
    inner_bytes: float
    inner_backward: float
    reduced_bytes: float
    other_flops: float
    ends_again: int
    recomputed: Mapping[str, Recomputed] = field(hash=False)

    @property
    def flops(self) -> float:
        """Model FLOPs of a sequence, forward and backward, nothing computed twice."""
        trained = self.trained()
        products = sum(
            product.flops * (2 + (product.path in trained)) for product in self.products
        )
        return products + (1 + self.inner_backward) * self.inner_flops

    def trained(self) -> set[str]:
        """Names of the parameters that have gradients."""
        return {each.path for each in self.parameters if each.is_trained}

    @property
    def state_bytes(self) -> float:
        """Of the parameters and the optimizer's state, which checkpoints have."""
        return sum(e.size * (e.itemsize + e.state_bytes) for e in self.parameters)

    def layered(self) -> set[str]:
        """Names of the parameters that layers have parts of."""
        return {each.path for each in self.parameters if each.is_layered}


def workload(config: Config, target: Target, policies: tuple[Any, ...]) -> Workload:
    """The workload of a run.

    Args:
      config: Its settings; layout and batch do not matter.
      target: Whose kernels are chosen; those of CPUs where its compiler is missing.
      policies: Of rematerialization, each as ``training.remat`` takes it.
    """
    # The kind of the devices decides, and thousands of them take long to make.
    few = tuple(min(size, 2) for size in target.shape)
    compiler = target.compiler if target.is_installed else "cpu"
    target = replace(target, shape=few, slices=1, compiler=compiler)
    mesh = Mesh(("fsdp",), shape=(1,), target=target)
    model = _model(config, mesh, "none")
    forward = _traced(config, model, mesh, is_backward=False)
    plain = _traced(config, model, mesh)
    parameters = tuple(_parameters(model, config))
    trained = {each.path for each in parameters if each.is_trained}
    backward_products = sum(
        p.flops * (1 + (p.path in trained)) for p in forward.products
    )
    inner = max(plain.total_flops - forward.total_flops - backward_products, 0.0)
    layered = {each.path: each for each in parameters if each.is_layered}
    in_layers = sum(p.flops for p in forward.products if p.path in layered)
    gradients = sum(p.size * p.itemsize for p in layered.values() if p.is_trained)
    # Under ``none`` also parameters that were cast, which devices store in parts.
    precision, chunk = config.training.precision, config.training.loss_chunk
    objective = config.training.objective
    width = jnp.dtype(precision.computation).itemsize
    multiplied = {layered[p.path] for p in forward.products if p.path in layered}
    casts = 0, sum(width * p.size for p in multiplied if width < _TRACED)
    stacked = [each for each in parameters if "layers" in each.names]
    layers = [each.shape[each.names.index("layers")] for each in stacked]
    recomputed = {}
    for policy in policies:
        remade = _model(config, mesh, policy)
        backward = plain if policy == "none" else _traced(config, remade, mesh)
        more = backward.total_flops - plain.total_flops
        kept = max(backward.stacked_bytes - gradients - casts[policy == "none"], 0.0)
        again = min(max(more, 0.0), forward.inner_flops)
        share = max(more - again, 0.0) / in_layers if in_layers else 0.0
        rows = _traced(config, remade, mesh, _ROWS)
        more_rows = rows.operations - backward.operations
        recomputed[str(policy)] = Recomputed(
            products=min(share, 1.0),
            inner_flops=again,
            kept_bytes=kept,
            operations=backward.operations,
            operations_of_row=max(more_rows, 0.0) / (_ROWS - 1),
        )
    amounts = map(astuple, recomputed.values())
    least = Recomputed(*map(min, zip(*amounts, strict=True)))
    recomputed[LEAST] = replace(least, kept_bytes=0.0)
    return Workload(
        sequence_length=config.training.sequence_length,
        num_layers=max(layers, default=1),
        matmul_dtype="float8" if precision.fp8 else precision.computation,
        reduced_itemsize=jnp.dtype(precision.reduction).itemsize,
        parameters=parameters,
        products=tuple(forward.products),
        lookups=tuple(forward.lookups),
        inner_flops=forward.inner_flops,
        inner_bytes=forward.inner_bytes,
        inner_backward=inner / forward.inner_flops if forward.inner_flops else 0.0,
        reduced_bytes=forward.reduced_bytes,
        other_flops=forward.other_flops,
        ends_again=int(objective != NEXT_TOKEN and chunk != "none"),
        recomputed=recomputed,
    )


def _model(config: Config, mesh: Mesh, policy: Any) -> Model:
    """The model with a policy of rematerialization, on one device."""
    training = replace(config.training, remat=policy)
    if training.precision.fp8:  # the same products, of other operands
        training = replace(training, mixed_precision="bf16")
    on_one = replace(config.model, mesh_shape=((1,), ("fsdp",)))
    return build_model(replace(config, model=on_one, training=training), mesh)


def _traced(
    config: Config, model: Model, mesh: Mesh, rows: int = 1, *, is_backward: bool = True
) -> TracedCosts:
    """What the loss of some sequences costs, or its gradient, on one device."""

    def loss(trained: Any, params: Any, batch: Any) -> Any:
        whole, chunk = model.with_frozen(trained, params), config.training.loss_chunk
        return model.loss(whole, batch, model.place(None), chunk=chunk)[0]

    model = model.dequantized()
    struct = jax.ShapeDtypeStruct((rows, config.training.sequence_length), jnp.int32)
    params, names = model.abstract(), _dim_names(model)
    inputs = (model.trained(params), params)
    traced = jax.grad(loss) if is_backward else loss
    with scope.opened(Scope(mesh=mesh)):
        closed = jax.make_jaxpr(traced)(*inputs, dict.fromkeys(_BATCH, struct))
    weights = [
        Weight(path, names[path]) for tree in inputs for path in named_leaves(tree)
    ]
    return find_products(closed, [*weights, *([None] * len(_BATCH))])


def _parameters(model: Model, config: Config) -> list[Parameter]:
    """As they are traced, with the bytes that are stored for them."""
    stored, quantized = named_leaves(model.abstract()), model.quantized
    model = model.dequantized()
    names = _dim_names(model)

    def itemsize(path: str, leaf: jax.ShapeDtypeStruct) -> float:
        module = path.removesuffix("kernel")
        parts = {f"{module}codes", f"{module}scales"} & quantized
        leaves = [stored[part] for part in parts] or [leaf]
        return sum(each.size * each.dtype.itemsize for each in leaves) / leaf.size

    optimizer, _ = make_optimizer(
        config.optimizer,
        steps=config.training.steps,
        clip_norm=config.training.clip_norm,
    )

    def state_bytes(leaf: jax.ShapeDtypeStruct) -> float:
        state = jax.tree.leaves(jax.eval_shape(optimizer.init, {"w": leaf}))
        nbytes = sum(each.size * each.dtype.itemsize for each in state if each.shape)
        return nbytes / leaf.size

    return [
        Parameter(
            path=path,
            shape=leaf.shape,
            names=names[path],
            itemsize=itemsize(path, leaf),
            is_trained=path not in model.frozen,
            is_layered=any(name in _STACKED for name in names[path]),
            state_bytes=0.0 if path in model.frozen else state_bytes(leaf),
        )
        for path, leaf in named_leaves(model.abstract()).items()
    ]


def _dim_names(model: Model) -> dict[str, tuple[str | None, ...]]:
    """The logical names of each parameter's dims, by the parameter's name."""
    tree = model.abstract()
    names = jax.tree.structure(tree).flatten_up_to(model.dim_names())
    return dict(zip(named_leaves(tree), names, strict=True))
