# SPDX-License-Identifier: Apache-2.0
"""Mistral, whose layers all have a window, or none of them.

Source: Mistral 7B, arXiv 2310.06825.
"""

from typing import Any, Final

from tessera.models.decoder.config import DecoderConfig
from tessera.models.families.config_keys import ConfigKeys
from tessera.models.families.dense import TABLE, TIED, read_sizes, write_sizes
from tessera.models.families.family import Family

_WINDOW: Final = 4096


def _read(keys: ConfigKeys) -> DecoderConfig:
    # Transformers ignores this key of a Mistral: it would leave out the biases.
    keys.expect("attention_bias", False)
    sizes = read_sizes(keys)
    window = None
    # The default is a window: only null says that there is none.
    if keys.values.get("sliding_window", _WINDOW) is not None:
        window = keys.take("sliding_window", int, _WINDOW)
        base, scale = sizes.pop("rope_base_global"), sizes.get("rope_scale_global", 1.0)
        if scale != 1:
            keys.refuse("rope_parameters", "layers with a window are not scaled")
        sizes |= {"global_every": None, "rope_base_local": base}
    keys.skip("sliding_window")
    return DecoderConfig(**sizes, qk_norm=False, window=window)


def _write(config: DecoderConfig) -> dict[str, Any]:
    values = write_sizes(config)
    if config.window is not None:
        values["rope_theta"] = config.rope_base_local
        values["rope_parameters"]["rope_theta"] = config.rope_base_local
    return {**values, "sliding_window": config.window}


MISTRAL: Final = Family(
    name="mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    read_config=_read,
    write_config=_write,
    tensors=TABLE,
    tied=TIED,
)
