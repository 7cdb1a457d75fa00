# SPDX-License-Identifier: Apache-2.0
"""Random adapters on random meshes: numbers of the merged weights in plain JAX.

Logits, loss and the gradients of every parameter.
"""

import dataclasses
from random import Random
from typing import Any

import pytest

from tessera.mesh import Mesh
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.decoder.config import LoraConfig
from tests.train.models.decoder.lora_reference import assert_same_as_merged

MESHES = ("", "fsdp", "tp", "dp tp", "fsdp tp", "dp cp", "ep tp", "fsdp ep")


def drawn_model(draw: Random) -> tuple[DecoderModel, Mesh | None]:
    axes = draw.choice(MESHES).split()
    config: dict[str, Any] = {
        "vocab_size": 16,
        "d_model": draw.choice([8, 16]),
        "num_layers": draw.randint(1, 3),
        "num_heads": 4,
        "num_kv_heads": draw.choice([1, 2, 4]),
        "head_dim": draw.choice([4, 8]),
        "mlp_dim": draw.choice([8, 24]),
        "window": draw.choice([None, 5]),
        "global_every": draw.choice([1, 2, 3]),
        "scan_unroll": draw.randint(1, 2),
        "tied_head": draw.random() < 0.5,
        "post_norms": draw.random() < 0.5,
        "qk_norm_joint": draw.random() < 0.5,
        "qkv_bias": draw.random() < 0.5,
        "output_bias": draw.random() < 0.5,
    }
    if config["window"] is None:
        config["global_every"] = 1
    if "ep" in axes or draw.random() < 0.2:
        config |= {"num_experts": 2, "experts_per_token": draw.randint(1, 2)}
    sizes = DecoderConfig(**config).projections
    targets = draw.sample([*sizes], draw.randint(1, len(sizes)))
    most = min(min(sizes[name]) for name in targets)
    rank = draw.choice([1, most, draw.randint(1, most)])
    lora = LoraConfig(rank, draw.choice([None, 0.5, 7.0]), tuple(targets))
    mesh = Mesh(axes, range(2 ** len(axes)), (2,) * len(axes)) if axes else None
    options = {"remat": draw.choice(["none", "full", "dots"])}
    if "tp" in axes:
        options["sequence_parallel"] = draw.random() < 0.5
    return DecoderModel(DecoderConfig(**config, lora=lora), **options), mesh


@pytest.mark.full
@pytest.mark.fuzz(sample=1, whole=300)
def test_adapters_compute_what_merged_weights_compute(seed: int) -> None:
    model, mesh = drawn_model(Random(seed))
    assert_same_as_merged(model, mesh, seed)


@pytest.mark.full
def test_a_wrong_scale_is_found(monkeypatch: Any) -> None:
    model, _ = drawn_model(Random(0))
    # Of its own size: JAX remembers what it traced of a model, here the right scale.
    config = dataclasses.replace(model.config, vocab_size=17)
    model = dataclasses.replace(model, config=config)
    monkeypatch.setattr(LoraConfig, "scale", 1.01 * model.config.lora.scale)
    with pytest.raises(AssertionError, match="Not equal"):
        assert_same_as_merged(model)
