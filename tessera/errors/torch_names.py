# SPDX-License-Identifier: Apache-2.0
"""What to write in place of names of PyTorch, for messages about names that are not."""

from collections.abc import Mapping
from typing import Final

_MOVED: Final = "leave it out: arguments are moved to the step's devices"
_DTYPE: Final = "x.astype(ts.bf16), or ts.f32, …"
_SLOPE: Final = "grads = ts.grad(loss, weights)"

METHODS: Final[Mapping[str, str]] = {
    "to": f"{_DTYPE}; for devices {_MOVED}",
    **dict.fromkeys(("cuda", "cpu"), _MOVED),
    **dict.fromkeys(("float", "half", "bfloat16", "double", "int", "long"), _DTYPE),
    **dict.fromkeys(("backward", "requires_grad", "requires_grad_"), _SLOPE),
    **dict.fromkeys(
        ("contiguous", "clone"), "leave it out: operations make new arrays"
    ),
    "detach": "jax.lax.stop_gradient(x)",
    "numpy": "return it, and use np.asarray on the result",
    "view": "x.reshape(...)",
    "unsqueeze": "jnp.expand_dims(x, 1), or x[:, None]",
    "permute": "x.transpose(0, 2, 1)",
    "expand": "jnp.broadcast_to(x, shape)",
    "masked_fill": "jnp.where(mask, value, x)",
}
"""Methods of tensors that arrays do not have."""

NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("cuda", "device"), "jax.devices()"),
    **dict.fromkeys(("no_grad", "inference_mode"), "nothing: gradients are asked for"),
    **dict.fromkeys(("rand", "randn", "manual_seed"), "jax.random.normal(key, shape)"),
    "optim": "optax, such as optax.adamw(1e-3)",
    "compile": "ts.function(step)",
    "save": "tessera.train.save_checkpoint(folder, state, step=1)",
    "load": "tessera.train.restore_checkpoint(folder, like=state)",
}
"""Names of the module ``torch``."""
