# SPDX-License-Identifier: Apache-2.0
"""Llama 3, and the Llamas before it, which have the same keys.

Source: The Llama 3 Herd of Models, arXiv 2407.21783.
"""

from typing import Any, Final

from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import ConfigKeys
from tessera.train.models.families.dense import (
    TABLE,
    check_width,
    read_dense,
    write_sizes,
)
from tessera.train.models.families.family import Family


def _read(keys: ConfigKeys) -> dict[str, Any]:
    return read_dense(keys) | {"global_every": 1, "qk_norm": False}


def _write(config: DecoderConfig) -> dict[str, Any]:
    check_width(config)
    return write_sizes(config)


LLAMA3: Final = Family(
    name="llama3",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    read_config=_read,
    write_config=_write,
    tensors=TABLE,
)
