# SPDX-License-Identifier: Apache-2.0
"""Adds the adapters of LoRA to the weights beside them, one parameter at a time."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from tessera.foundations.tree import named_leaves
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.decoder.quantized_kernel import dequantize

# Dtype and shape of each parameter by name, ``decoder.mlp.up.kernel``.
Layouts: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
# Returns a parameter by name.
Read: TypeAlias = Callable[[str], np.ndarray]


def adapters_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The names of A and B of each weight that has an adapter.

    Example:
      >>> adapters_of(["up.kernel", "up.lora_a", "up.lora_b", "gate.kernel"])
      {'up.kernel': ('up.lora_a', 'up.lora_b')}
    """
    known = {name.replace(".codes", ".kernel") for name in names}
    modules = [
        name.removesuffix("lora_a") for name in names if name.endswith(".lora_a")
    ]
    pairs = {f"{m}kernel": (f"{m}lora_a", f"{m}lora_b") for m in modules}
    return {name: pair for name, pair in pairs.items() if {name, *pair} <= known}


def merge_adapters(config: Any, layouts: Layouts, read: Read) -> tuple[Layouts, Read]:
    """The parameters of the same model without adapters.

    Args:
      config: The model's configuration; only a decoder has adapters.
      layouts: The parameters, adapters included.
      read: Returns one of them.

    Returns:
      The layouts without adapters; and a function that returns a parameter, of a weight
      with an adapter the sum ``W + scale * A B`` in float32, where W may be quantized.
    """
    layouts, read = _dequantized(config, layouts, read)
    pairs = adapters_of(layouts) if isinstance(config, DecoderConfig) else {}
    adapters = {name for pair in pairs.values() for name in pair}

    def read_merged(name: str) -> np.ndarray:
        if name not in pairs:
            return read(name)
        weight = read(name).astype(np.float32)
        a, b = (read(part).astype(np.float32) for part in pairs[name])
        for layer in range(len(weight)):
            low = np.float32(config.lora.scale) * a[layer]
            weight[layer] += np.tensordot(low, b[layer], axes=1)
        return weight

    kept = {name: layout for name, layout in layouts.items() if name not in adapters}
    return kept, read_merged


def _dequantized(config: Any, layouts: Layouts, read: Read) -> tuple[Layouts, Read]:
    """The parameters with weights for their codes and scales."""
    if not (isinstance(config, DecoderConfig) and config.lora.is_quantized):
        return layouts, read
    leaves = named_leaves(DecoderModel(config).dequantized().abstract())
    shapes = {name.replace("/", "."): leaf.shape for name, leaf in leaves.items()}

    def read_weight(name: str) -> np.ndarray:
        if name in layouts:
            return read(name)
        codes, scales = (read(name.replace("kernel", x)) for x in ("codes", "scales"))
        layers = zip(codes, scales, strict=True)
        return np.stack([dequantize(*each) for each in layers]).reshape(shapes[name])

    # Rounding has changed the dtype of all.
    of_scales = {n.replace("scales", "kernel"): x for n, x in layouts.items()}
    return {n: (of_scales[n][0], shape) for n, shape in shapes.items()}, read_weight
