# SPDX-License-Identifier: Apache-2.0
"""Mistral, whose layers all have a window, or none of them.

Source: Mistral 7B, arXiv 2310.06825.
"""

from typing import Any, Final

from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import ConfigKeys
from tessera.train.models.families.dense import TABLE, read_dense, write_sizes
from tessera.train.models.families.family import Family


def _read(keys: ConfigKeys) -> dict[str, Any]:
    # Transformers ignores this key of a Mistral: it would leave out the biases.
    keys.expect("attention_bias", False)
    sizes = read_dense(keys, {"num_key_value_heads": 8})
    window = keys.take_nullable("sliding_window", int, 4096)
    every = 1 if window is None else None
    return sizes | {"global_every": every, "qk_norm": False, "window": window}


def _write(config: DecoderConfig) -> dict[str, Any]:
    window = config.window if "local" in config.layer_kinds else None
    return {**write_sizes(config), "sliding_window": window}


MISTRAL: Final = Family(
    name="mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    read_config=_read,
    write_config=_write,
    tensors=TABLE,
)
