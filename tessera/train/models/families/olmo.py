# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 and OLMo 3, which normalize after attention and MLP alone.

Sources: 2 OLMo 2 Furious, arXiv 2501.00656; Olmo 3, arXiv 2512.13961.
"""

from typing import Any, Final

from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import (
    ConfigKeys,
    read_rope,
    read_rope_kind,
)
from tessera.train.models.families.dense import (
    read_dense,
    read_layer_types,
    read_scaling,
    read_sizes,
    tensor_table,
    write_layer_types,
    write_sizes,
)
from tessera.train.models.families.family import Family

_FEATURES: Final = {"pre_norms": False, "post_norms": True, "qk_norm_joint": True}
_DEFAULTS: Final = {"rms_norm_eps": 1e-5}
_THETA: Final = 500_000.0


def _read_olmo2(keys: ConfigKeys) -> dict[str, Any]:
    return read_dense(keys, _DEFAULTS) | _FEATURES | {"global_every": 1}


def _read_olmo3(keys: ConfigKeys) -> dict[str, Any]:
    keys.expect("hidden_act", "silu")
    local = read_rope(keys, "sliding_attention")
    whole = read_rope(keys, "full_attention")
    own = keys.take_part("rope_parameters").take_part("sliding_attention")
    if "rope_theta" not in own:
        # Versions of Transformers differ in whether layers with a window read it.
        keys.expect("rope_theta", _THETA)
    read_rope_kind(local)
    scaling = read_scaling(keys, whole)
    sizes = read_sizes(keys, defaults=_DEFAULTS) | _FEATURES
    layers = read_layer_types(keys, sizes["num_layers"]) or {"global_every": 4}
    return sizes | {
        **layers,
        "window": keys.take_nullable("sliding_window", int, 4096),
        "rope_base_local": local.take("rope_theta", float, _THETA),
        "rope_base_global": whole.take("rope_theta", float, _THETA),
        "rope_scale_global": scaling.pop("factor", 1.0),
        **scaling,
    }


def _write_olmo3(config: DecoderConfig) -> dict[str, Any]:
    values = write_sizes(config)
    if config.rope_base_local != config.rope_base_global:
        del values["rope_theta"]
    local = {"rope_type": "default", "rope_theta": config.rope_base_local}
    return values | {
        "sliding_window": config.window,
        "layer_types": write_layer_types(config),
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": local,
        },
    }


_TABLE: Final = tensor_table(
    {
        "post_attention_norm": "post_attention_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
)

OLMO2: Final = Family(
    name="olmo2",
    model_types=("olmo2",),
    architecture="Olmo2ForCausalLM",
    read_config=_read_olmo2,
    write_config=write_sizes,
    tensors=_TABLE,
)

OLMO3: Final = Family(
    name="olmo3",
    model_types=("olmo3",),
    architecture="Olmo3ForCausalLM",
    read_config=_read_olmo3,
    write_config=_write_olmo3,
    tensors=_TABLE,
)
