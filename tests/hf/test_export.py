# SPDX-License-Identifier: Apache-2.0
"""Transformers loads what Tessera exports, and computes the same logits.

``make test-hf`` runs it: the libraries are in an environment of their own, which
``TESSERA_HF_PYTHON`` names.
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.mesh import Mesh
from tessera.models import DecoderConfig, DecoderModel, save_pretrained

PYTHON = os.environ.get("TESSERA_HF_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-hf has Transformers")

GEMMA3 = DecoderConfig(
    vocab_size=96,
    d_model=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    mlp_dim=48,
    window=7,
    query_pre_attn_scalar=10,
    global_every=3,
    rope_base_local=100.0,
    rope_base_global=1000.0,
    rope_scale_global=4.0,
    norm_epsilon=1e-5,
)
CONFIGS = {"Gemma3ForCausalLM": GEMMA3}
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 40)).astype(np.int32)


def random_params(model: DecoderModel, mesh: Mesh | None = None) -> Any:
    """Parameters none of which is zero: norms and biases matter, too."""
    params = model.init(jax.random.key(0), mesh)
    draw = np.random.default_rng(1)

    def vary(x: jax.Array) -> jax.Array:
        noise = draw.standard_normal(x.shape).astype(np.float32)
        return jax.device_put(x + 0.2 * noise, x.sharding)

    return jax.tree.map(vary, params)


def load(folder: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """The logits that Transformers computes, and what it loaded."""
    tokens, logits = folder.with_name("tokens.npy"), folder.with_name("logits.npy")
    np.save(tokens, TOKENS)
    script = Path(__file__).with_name("load_folder.py")
    done = subprocess.run(
        [str(PYTHON), str(script), str(folder), str(tokens), str(logits)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return np.load(logits), json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_equal_after_an_export_from_a_mesh(name: str, tmp_path: Path):
    model = DecoderModel(CONFIGS[name])
    params = random_params(model, Mesh(["fsdp", "tp"], range(4), (2, 2)))
    save_pretrained(params, tmp_path / "out", model=model, shard_bytes=20_000)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    theirs, what = load(tmp_path / "out")
    assert what == {
        "class": name,
        "problems": {},
        "dtype": "torch.float32",
        "eos": None,
    }
    ours = np.asarray(jax.jit(model.apply)(params, jnp.asarray(TOKENS)))
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"window": 8},
        {"rope_scale_global": 1.0},
        {"rope_base_local": 200.0},
        {"query_pre_attn_scalar": 12},
        {"global_every": 2},
        {"norm_epsilon": 1e-2},
    ],
    ids=str,
)
def test_every_constant_of_the_configuration_arrives(change: Any, tmp_path: Path):
    """Another constant gives other logits here, and the same ones there."""
    before, model = (
        DecoderModel(GEMMA3),
        DecoderModel(dataclasses.replace(GEMMA3, **change)),
    )
    params = random_params(model)
    save_pretrained(params, tmp_path / "out", model=model)
    theirs, _ = load(tmp_path / "out")
    ours, other = (
        np.asarray(jax.jit(one.apply)(params, jnp.asarray(TOKENS)))
        for one in (model, before)
    )
    largest = np.abs(theirs).max()
    assert np.abs(other - theirs).max() > 1e-4 * largest
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * largest, rtol=0)
