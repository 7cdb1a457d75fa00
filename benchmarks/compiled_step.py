# SPDX-License-Identifier: Apache-2.0
"""What a training step keeps and sends on a machine that is not here.

    python benchmarks/compiled_step.py --targets h100:1x8 v5p:2x2x2

The sizes of Gemma 3 1B on ``fsdp``, two sequences of 4,096 tokens a device, bf16, by
the target's own compiler: Tessera's trainer, and the same sizes in plain JAX as people
write it, with bf16 activations, f32 parameters, ``lax.scan`` over layers, and attention
that is recomputed. A step of each takes some seconds for H100, a minute for TPUs.
"""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import jax
import jax.numpy as jnp
import optax
import report
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis.ledger import Ledger
from tessera.foundations.config_files import configs_dir
from tessera.mesh import Mesh
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.loop.build_run import Run
from tessera.train.runtime.devices import prepare_devices

LAYERS, WIDTH, HEADS, HEAD_DIM, MLP, VOCABULARY = 26, 1152, 4, 256, 6912, 262_144
ROWS, LENGTH, CHUNK = 2, 4096, 512
NAMES = ("query", "key", "value", "attention", "gate", "up")
POLICIES = {
    "none": None,
    "named": jax.checkpoint_policies.save_only_these_names(*NAMES),
    "full": jax.checkpoint_policies.nothing_saveable,
}
SHAPES = {
    "query": (LAYERS, WIDTH, HEADS * HEAD_DIM),
    "key": (LAYERS, WIDTH, HEAD_DIM),
    "value": (LAYERS, WIDTH, HEAD_DIM),
    "output": (LAYERS, HEADS * HEAD_DIM, WIDTH),
    "gate": (LAYERS, WIDTH, MLP),
    "up": (LAYERS, WIDTH, MLP),
    "down": (LAYERS, MLP, WIDTH),
    **{f"norm{number}": (LAYERS, WIDTH) for number in range(4)},
    "table": (VOCABULARY, WIDTH),
}
# The dim that fsdp splits is the width of the residual stream.
SPECS = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), P(None, "fsdp")),
    **dict.fromkeys(("output", "down"), P(None, None, "fsdp")),
    **{f"norm{number}": P() for number in range(4)},
    "table": P(None, "fsdp"),
}


def norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (unit * (1.0 + scale)).astype(x.dtype)


def rotated(x: Any) -> Any:
    frequencies = 1e4 ** -(jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = jnp.arange(x.shape[1])[:, None] * frequencies
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


@jax.checkpoint
def attention(query: Any, key: Any, value: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def layer(layout: NamedSharding, x: Any, weights: Any) -> Any:
    w = {name: each.astype(jnp.bfloat16) for name, each in weights.items()}
    inner = norm(x, weights["norm0"])
    query, key, value = (
        checkpoint_name((inner @ w[name]).reshape(*x.shape[:2], -1, HEAD_DIM), name)
        for name in ("query", "key", "value")
    )
    mixed = attention(rotated(query), rotated(key), value)
    mixed = checkpoint_name(mixed, "attention").reshape(*x.shape[:2], -1)
    x = x + norm(mixed @ w["output"], weights["norm1"])
    inner = norm(x, weights["norm2"])
    gate = checkpoint_name(inner @ w["gate"], "gate")
    up = checkpoint_name(inner @ w["up"], "up")
    x = x + norm((jax.nn.gelu(gate) * up) @ w["down"], weights["norm3"])
    return jax.lax.with_sharding_constraint(x, layout), None


def loss(policy: Any, layout: NamedSharding, params: Any, tokens: Any) -> Any:
    table = params["table"].astype(jnp.bfloat16)
    body = partial(layer, layout)
    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    layers = {name: each for name, each in params.items() if name != "table"}
    x = jax.lax.with_sharding_constraint(table[tokens] * WIDTH**0.5, layout)
    x, _ = jax.lax.scan(body, x, layers)

    @jax.checkpoint
    def of_chunk(total: Any, chunk: Any) -> Any:
        hidden, targets = chunk
        logits = jnp.einsum(
            "rcd,vd->rcv", hidden, table, preferred_element_type=jnp.float32
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return total + losses.sum(), None

    def chunked(array: Any) -> Any:
        size = CHUNK // ROWS
        parts = array.reshape(array.shape[0], -1, size, *array.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    chunks = chunked(x), chunked(tokens)
    return jax.lax.scan(of_chunk, jnp.float32(0), chunks)[0] / tokens.size


def by_hand(mesh: Mesh, name: str) -> Any:
    """The compiled step of plain JAX."""
    optimizer = optax.adamw(1e-3)
    layout = NamedSharding(mesh.compile_mesh, P("fsdp"))

    def step(params: Any, state: Any, tokens: Any) -> Any:
        of_params = partial(loss, POLICIES[name], layout)
        value, gradients = jax.value_and_grad(of_params)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def struct(shape: Any, spec: Any, dtype: Any = jnp.float32) -> Any:
        sharding = NamedSharding(mesh.compile_mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = {name: struct(shape, SPECS[name]) for name, shape in SHAPES.items()}
    state = optimizer.init
    abstract = jax.eval_shape(state, params)
    moments = jax.tree_util.tree_map_with_path(
        lambda path, each: struct(
            each.shape, SPECS.get(getattr(path[-1], "key", ""), P()), each.dtype
        ),
        abstract,
    )
    tokens = struct((ROWS * mesh.size, LENGTH), P("fsdp"), jnp.int32)
    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=(
            jax.tree.map(lambda each: each.sharding, params),
            jax.tree.map(lambda each: each.sharding, moments),
            None,
        ),
    )
    with jax.numpy_dtype_promotion("standard"):
        return jitted.lower(params, moments, tokens).compile()


def by_tessera(mesh: Mesh, target: str, remat: str) -> Any:
    """The compiled step of the trainer."""
    sizes = ",".join(map(str, mesh.shape.values()))
    words = [
        "model=gemma3_1b",
        "data=synthetic",
        f"model.mesh_shape=[[{sizes}],[{','.join(mesh.axes)}]]",
        "training.mixed_precision=bf16",
        f"training.sequence_length={LENGTH}",
        f"training.micro_batch_size={ROWS}",
        f"training.remat={remat}",
        f"runtime.target={target}",
        "training.dry_run=true",
    ]
    return Run(compose(words, configs_dir()).config, mesh).compiled


def sent(ledger: Ledger, kind: str) -> float:
    """GiB of one kind of collective in a step."""
    rows = (row for row in ledger.rows if row.kind == kind)
    return round(sum(row.total_bytes for row in rows) / 2**30, 2)


def rows(targets: list[str], policies: tuple[str, ...]) -> Iterator[report.Row]:
    for name in targets:
        target = Target.parse(name)
        mesh = Mesh(("fsdp",), shape=(target.num_devices,), target=target)
        for policy in policies:
            report.progress(f"{name}, {policy}")
            ours = by_tessera(mesh, name, policy)
            plain = by_hand(mesh, policy) if policy in POLICIES else None
            memory = plain and plain.memory_analysis().temp_size_in_bytes
            found = ours.memory.temporaries
            yield {
                "target": name,
                "remat": policy,
                "Tessera temporaries GiB": round(found / 2**30, 2),
                "plain JAX": round(memory / 2**30, 2) if memory else "",
                "ratio": round(found / memory, 2) if memory else "",
                "all-gather GiB": sent(ours.collectives, "all-gather"),
                "reduce-scatter GiB": sent(ours.collectives, "reduce-scatter"),
            }


def main() -> None:
    """Compile both, print a table."""
    parser = report.parser(__doc__)
    parser.add_argument("--targets", nargs="+", default=["h100:1x8"])
    options = parser.parse_args()
    prepare_devices(1, "cpu")
    policies = ("full",) if options.quick else ("none", "dots", "named", "full")
    title = "What a step keeps and sends, of each device"
    report.show(title, list(rows(options.targets, policies)), options.json)


if __name__ == "__main__":
    main()
