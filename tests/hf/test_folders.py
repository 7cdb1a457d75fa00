# SPDX-License-Identifier: Apache-2.0
"""Transformers and Tessera load what the other has written: equal logits.

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

from tessera.foundations.tree import named_leaves
from tessera.mesh import Mesh
from tessera.train.commands.export import main as export
from tessera.train.loop.main import main as train
from tessera.train.loop.trained_model import open_trained
from tessera.train.models import (
    DecoderConfig,
    DecoderModel,
    from_pretrained,
    save_pretrained,
)
from tessera.train.models.decoder.config import LoraConfig
from tessera.train.models.families.dense import FEATURES
from tessera.train.models.families.gemma import GEMMA3 as GEMMA3_FAMILY
from tessera.train.models.families.registry import differences, family_for
from tessera.train.models.write_folder import write_adapters, write_folder

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
# Norms before attention and MLP alone, by the scale itself; gates of silu.
LLAMA3 = dataclasses.replace(
    GEMMA3,
    **FEATURES,
    window=None,
    query_pre_attn_scalar=None,
    global_every=1,
    rope_base_local=DecoderConfig.rope_base_local,
    rope_kind="llama3",
    rope_original_length=32,
    rope_high_rotations=4.0,
    qk_norm=False,
    tied_head=False,
)
QWEN3 = dataclasses.replace(
    LLAMA3,
    qk_norm=True,
    tied_head=True,
    qkv_bias=True,
    output_bias=True,
    rope_kind="yarn",
    rope_truncate=False,
)
QWEN2 = dataclasses.replace(QWEN3, qk_norm=False, output_bias=False, tied_head=False)
PHI3 = dataclasses.replace(
    LLAMA3,
    window=7,
    global_every=None,
    rope_base_local=1000.0,
    rope_scale_global=1.0,
    rope_kind="linear",
    rope_original_length=None,
    rope_high_rotations=32.0,
)
OLMO2 = dataclasses.replace(
    LLAMA3,
    pre_norms=False,
    post_norms=True,
    qk_norm=True,
    qk_norm_joint=True,
    qkv_bias=True,
    output_bias=True,
)
OLMO3 = dataclasses.replace(OLMO2, window=7, global_every=3, rope_base_local=200.0)
GPT_OSS = dataclasses.replace(
    LLAMA3,
    window=7,
    global_every=2,
    rope_base_local=1000.0,
    rope_scale_local=4.0,
    rope_kind="yarn",
    rope_truncate=False,
    qkv_bias=True,
    output_bias=True,
    activation="clamped_swiglu",
    attention_sinks=True,
    num_experts=6,
    expert_biases=True,
)
PHI4_MINI = dataclasses.replace(
    PHI3,
    head_dim=8,
    window=None,
    global_every=1,
    tied_head=True,
    rope_dims=6,
    rope_kind="longrope",
    rope_original_length=64,
    rope_attention_factor=1.2,
    rope_short_factors=(1.0, 1.5, 2.5),
    rope_long_factors=(2.0, 4.0, 8.0),
)
# Of layers with a window, too.
SCALED = {"rope_base_local": 1000.0, "rope_scale_local": 4.0}
CONFIGS = {
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3_irregular": (
        "Gemma3ForCausalLM",
        dataclasses.replace(
            GEMMA3,
            global_every=6,
            layer_types=("global", "local", "local", "global"),
            logit_soft_cap=2.0,
        ),
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        dataclasses.replace(
            GEMMA3,
            qk_norm=False,
            rope_base_local=1000.0,
            rope_scale_global=1.0,
            attention_soft_cap=1.5,
            logit_soft_cap=3.0,
        ),
    ),
    "llama3": ("LlamaForCausalLM", LLAMA3),
    # Transformers loads no Llama of this width.
    "llama3_heads": ("MistralForCausalLM", dataclasses.replace(LLAMA3, d_model=30)),
    "mistral": (
        "MistralForCausalLM",
        dataclasses.replace(LLAMA3, **SCALED, window=7, global_every=None),
    ),
    "qwen3": ("Qwen3ForCausalLM", QWEN3),
    "qwen3_windows": (
        "Qwen3ForCausalLM",
        dataclasses.replace(QWEN3, **SCALED, window=7, global_every=3),
    ),
    "phi3": ("Phi3ForCausalLM", PHI3),
    "olmo2": ("Olmo2ForCausalLM", OLMO2),
    "olmo3": ("Olmo3ForCausalLM", OLMO3),
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS),
    "phi3_longrope": ("Phi3ForCausalLM", PHI4_MINI),
    "qwen2": ("Qwen2ForCausalLM", QWEN2),
    "qwen2_windows": (
        "Qwen2ForCausalLM",
        dataclasses.replace(QWEN2, **SCALED, window=7, global_every=3),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        dataclasses.replace(QWEN3, num_experts=6, experts_per_token=2, tied_head=False),
    ),
}
# Whose models are those of other families, too.
MODEL_TYPES = {"Phi3ForCausalLM": "phi3"}
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 40)).astype(np.int32)


def random_params(model: DecoderModel, mesh: Mesh | None = None) -> Any:
    """Parameters none of which is zero: norms and biases matter, too."""
    params = model.init(jax.random.key(0), mesh)
    draw = np.random.default_rng(1)

    def vary(x: jax.Array) -> jax.Array:
        noise = draw.standard_normal(x.shape).astype(np.float32)
        return jax.device_put(x + 0.2 * noise, x.sharding)

    return jax.tree.map(vary, params)


def published_as(
    architecture: str, config: DecoderConfig, tmp_path: Path
) -> Path | None:
    """A folder of a family that is not the first one to compute the model."""
    if architecture not in MODEL_TYPES:
        return None
    family = family_for(config, MODEL_TYPES[architecture])
    (tmp_path / "published").mkdir(exist_ok=True)
    values = json.dumps({**family.values(config), "pad_token_id": None})
    (tmp_path / "published" / "config.json").write_text(values)
    return tmp_path / "published"


def run_transformers(mode: str, folder: Path, *rest: str) -> tuple[Any, dict[str, Any]]:
    """The logits that Transformers computes, and what it loaded."""
    tokens, logits = folder.with_name("tokens.npy"), folder.with_name("logits.npy")
    np.save(tokens, TOKENS)
    script = Path(__file__).with_name("transformers_models.py")
    files = map(str, (folder, tokens, logits))
    done = subprocess.run(
        [str(PYTHON), str(script), mode, *files, *rest],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return np.load(logits), json.loads(done.stdout.splitlines()[-1])


def load(folder: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """The same for a folder that Tessera has written."""
    return run_transformers("load", folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_equal_after_an_export_from_a_mesh(name: str, tmp_path: Path):
    architecture, config = CONFIGS[name]
    model = DecoderModel(config)
    params = random_params(model, Mesh(["fsdp", "tp"], range(4), (2, 2)))
    save_pretrained(
        params,
        tmp_path / "out",
        model=model,
        shard_bytes=20_000,
        published=published_as(architecture, config, tmp_path),
    )
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    theirs, what = load(tmp_path / "out")
    assert what == {
        "class": architecture,
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


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = GEMMA3_FAMILY.values(GEMMA3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Gemma3ForCausalLM", TEXT),
        ("Gemma3TextModel", TEXT),
        (
            "Gemma3ForConditionalGeneration",
            {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
        ),
    ],
)
def test_folders_that_transformers_writes_are_read(name, values, dtype, tmp_path):
    config = tmp_path / "values.json"
    config.write_text(json.dumps(values))
    theirs, _ = run_transformers("save", tmp_path / "model", name, str(config), dtype)
    model, params = from_pretrained(tmp_path / "model")
    assert not differences(model.config, GEMMA3)
    ours = np.asarray(jax.jit(model.apply)(params, jnp.asarray(TOKENS)))
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


ADAPTED = ("gemma3", "llama3", "qwen3", "qwen2")


@pytest.mark.parametrize("name", [*ADAPTED, "qwen3_moe", "gpt_oss"])
def test_peft_adds_adapters_as_tessera_does(name: str, tmp_path: Path):
    """Base and adapters in PEFT, the merged folder, and Tessera: equal logits."""
    targets = None if name in ADAPTED else ("q_proj", "o_proj")
    lora = LoraConfig(rank=3, alpha=7.0, targets=targets)
    model = DecoderModel(dataclasses.replace(CONFIGS[name][1], lora=lora))
    params = random_params(model)
    leaves = {key.replace("/", "."): x for key, x in named_leaves(params).items()}
    layouts = {key: (np.dtype("f4"), x.shape) for key, x in leaves.items()}

    def read(path: str) -> np.ndarray:
        return np.asarray(leaves[path])

    write_adapters(tmp_path / "peft", model.config, layouts, read, base=None)
    save_pretrained(params, tmp_path / "merged", model=model)
    base = [key for key in leaves if not key.endswith(("lora_a", "lora_b"))]
    base_layouts = {key: layouts[key] for key in base}
    write_folder(tmp_path / "base", model.config, base_layouts, read)
    ours = np.asarray(jax.jit(model.apply)(params, jnp.asarray(TOKENS)))
    close = {"atol": 1e-5 * np.abs(ours).max(), "rtol": 0}
    adapters = str(tmp_path / "peft")
    adapted, what = run_transformers("peft", tmp_path / "base", adapters)
    assert what["problems"] == {}
    assert what["warnings"] == []
    assert what["adapters"] == 2 * len(model.config.lora_targets) * 4
    np.testing.assert_allclose(adapted, ours, **close)
    np.testing.assert_allclose(load(tmp_path / "merged")[0], ours, **close)
    # Negative controls: without adapters, and with another scale.
    assert np.abs(load(tmp_path / "base")[0] - ours).max() > 100 * close["atol"]
    config = tmp_path / "peft" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 7.1}))
    other, _ = run_transformers("peft", tmp_path / "base", adapters)
    assert np.abs(other - ours).max() > 10 * close["atol"]


@pytest.fixture
def published(request: Any, tmp_path: Path) -> Path:
    """A folder with a tokenizer, and ``text.txt`` beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    _, config = CONFIGS[getattr(request, "param", "gemma3")]
    model = DecoderModel(config)
    save_pretrained(random_params(model), tmp_path / "published", model=model)
    vocab = {"<bos>": 0, "ab": 1, "ba": 2, "<unk>": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="ab"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "published" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("ab ba ba ab " * 2000)
    return tmp_path / "published"


def train_on_text(tmp_path: Path, *more: str) -> None:
    settings = [
        f"model={tmp_path / 'published'}",
        "model.mesh_shape=[[2,2],[fsdp,tp]]",
        f"data.tokenizer={tmp_path / 'published' / 'tokenizer.json'}",
        *("data=text", f"data.path={tmp_path / 'text.txt'}", "training.steps=3"),
        *(
            "training.sequence_length=16",
            "training.sample_length=0",
            "training.report=false",
            "training.mixed_precision=f32",
        ),
        *(f"hydra.run.dir={tmp_path / 'run'}", *more),
    ]
    assert train(settings) == 0


FAMILIES = ("gemma3", "gemma2", "llama3", "mistral", "qwen3", "qwen3_moe", "qwen2")
FAMILIES += ("olmo2", "gpt_oss")


@pytest.mark.parametrize(
    ("published", "architecture"),
    [(name, CONFIGS[name][0]) for name in FAMILIES],
    indirect=["published"],
)
@pytest.mark.usefixtures("published")
def test_a_folder_is_trained_by_commands_and_loaded_again(
    architecture: str, tmp_path: Path
):
    train_on_text(tmp_path)
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), "--format=hf"]) == 0
    theirs, what = load(tmp_path / "out")
    assert what["class"] == architecture
    if architecture != "Qwen2ForCausalLM":  # whose class of tokenizers knows no words
        assert what["ids"] == [1, 2]
    assert what["problems"] == {}
    assert what["eos"] == 0
    model, params = from_pretrained(tmp_path / "out")
    ours = np.asarray(jax.jit(model.apply)(params, jnp.asarray(TOKENS)))
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


def test_adapters_are_trained_by_commands_and_loaded_by_peft(
    published: Path, tmp_path: Path
):
    lora = "model.lora.rank=4", "model.lora.alpha=64", "optimizer.learning_rate=0.05"
    train_on_text(tmp_path, *lora, "optimizer.warmup_steps=0")
    run, adapters = str(tmp_path / "run"), str(tmp_path / "adapters")
    assert export([run, adapters, "--format=peft"]) == 0
    assert export([run, str(tmp_path / "merged"), "--format=hf"]) == 0
    adapted, what = run_transformers("peft", published, adapters)
    assert what["warnings"] == []
    theirs, _ = load(tmp_path / "merged")
    trained = open_trained(run)
    params = trained.read(None)
    ours = np.asarray(jax.jit(trained.model.apply)(params, jnp.asarray(TOKENS)))
    close = {"atol": 1e-5 * np.abs(ours).max(), "rtol": 0}
    np.testing.assert_allclose(adapted, ours, **close)
    np.testing.assert_allclose(theirs, ours, **close)
    assert np.abs(load(published)[0] - ours).max() > 100 * close["atol"]
