# SPDX-License-Identifier: Apache-2.0
"""What to write in place of names of PyTorch, for messages about names that are not."""

from collections.abc import Mapping
from typing import Final

_MOVED: Final = "leave it out: arguments are moved to the step's devices"
_DTYPE: Final = "x.astype(ts.bf16), or ts.f32, …"
_SLOPE: Final = "grads = ts.grad(loss, weights)"

METHODS: Final[Mapping[str, str]] = {
    "to": f"{_DTYPE}; for devices {_MOVED}",
    **dict.fromkeys(("cuda", "cpu", "device", "is_cuda"), _MOVED),
    **dict.fromkeys(("float", "half", "bfloat16", "double", "int", "long"), _DTYPE),
    **dict.fromkeys(("bool", "type", "type_as"), _DTYPE),
    **dict.fromkeys(("backward", "grad", "requires_grad", "requires_grad_"), _SLOPE),
    **dict.fromkeys(
        ("contiguous", "clone"), "leave it out: operations make new arrays"
    ),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "an operator: x == y, x < y"),
    **dict.fromkeys(("sub", "mul", "div", "mm", "bmm"), "an operator: x - y, x @ y"),
    **dict.fromkeys(("detach", "data"), "jax.lax.stop_gradient(x)"),
    **dict.fromkeys(
        ("split", "chunk"), "jnp.split(x, 2, axis=0), where 2 is how many parts"
    ),
    "t": "x.T",
    "dim": "x.ndim",
    "numel": "x.size",
    "size": "x.shape, or x.shape[0]",
    "flatten": "x.reshape(x.shape[0], -1)",
    "norm": "jnp.linalg.norm(x)",
    "clamp": "jnp.clip(x, min, max)",
    "topk": "jax.lax.top_k(x, k)",
    "gather": "jnp.take_along_axis(x, index, axis=1)",
    "index_select": "jnp.take(x, index, axis=0)",
    "new_zeros": "jnp.zeros(shape, x.dtype)",
    "numpy": "return it, and use np.asarray on the result",
    "view": "x.reshape(...)",
    "unsqueeze": "jnp.expand_dims(x, 1), or x[:, None]",
    "permute": "x.transpose(0, 2, 1)",
    "expand": "jnp.broadcast_to(x, shape)",
    "masked_fill": "jnp.where(mask, value, x)",
}
"""Methods of tensors that arrays do not have, or have with another meaning."""

KEYWORDS: Final[Mapping[str, str]] = {
    "dim": "axis=",
    "keepdim": "keepdims=",
    "unbiased": "ddof=1, which is PyTorch's default, or ddof=0",
}
"""Keywords of functions and methods that JAX's have by another name."""

NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("cuda", "device"), "jax.devices()"),
    "pmap": "ts.distribute('data_parallel'), or op.kernel",
    "cat": "jax.numpy.concatenate",
    **dict.fromkeys(("no_grad", "inference_mode"), "nothing: gradients are asked for"),
    **dict.fromkeys(("rand", "randn"), "jax.random.normal(key, shape)"),
    "manual_seed": "jax.random.key(0), and jax.random.split(key) for new ones",
    "DataLoader": "any iterator of NumPy batches; "
    "tessera.train.data.EpochSampler gives indices",
    "GradScaler": "ts.amp.LossScale with f16; bf16 needs none",
    "optim": "optax, such as optax.adamw(1e-3)",
    "compile": "ts.function(step)",
    "save": "tessera.train.save_checkpoint(folder, state, step=1)",
    "load": "tessera.train.restore_checkpoint(folder, like=state)",
}
"""Names of the module ``torch``."""

_OBJECTS: Final = "jax.experimental.multihost_utils.process_allgather(array)"

DISTRIBUTED: Final[Mapping[str, str]] = {
    "get_rank": "jax.process_index(), or jax.lax.axis_index('dp') in op.kernel",
    "get_world_size": "jax.process_count(), or jax.device_count()",
    "barrier": "nothing: devices wait for what they need; for files "
    "jax.experimental.multihost_utils.sync_global_devices('saved')",
    **dict.fromkeys(
        ("init_process_group", "is_initialized", "destroy_process_group"),
        "tessera.train.runtime.process_group.joined, or jax.distributed.initialize()",
    ),
    "ReduceOp": "op='sum', 'mean', 'max' or 'min'",
    "new_group": "the axis of a mesh: axis='dp'",
    **dict.fromkeys(("DeviceMesh", "init_device_mesh"), "dist.Mesh(['dp', 'tp'])"),
    "reduce": "dist.all_reduce(x, 'dp'): every device has the result",
    "all_gather_into_tensor": "dist.all_gather(x, 'dp')",
    "reduce_scatter_tensor": "dist.reduce_scatter(x, 'dp')",
    **dict.fromkeys(("all_gather_object", "broadcast_object_list"), _OBJECTS),
}
"""Names of ``torch.distributed``."""

AMP: Final[Mapping[str, str]] = {"GradScaler": NAMES["GradScaler"]}
"""Names of ``torch.amp``."""
