# SPDX-License-Identifier: Apache-2.0
"""A server samples with the weights that it was sent last, or an error says why not."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from tessera.errors import (
    ModelFolderError,
    ServerError,
    SettingConflictError,
    SettingValueError,
)
from tessera.mesh import Mesh
from tessera.train.models import DecoderModel, config_of, from_pretrained
from tessera.train.models.decoder.config import LoraConfig
from tessera.train.models.families.published_files import Published
from tessera.train.models.frozen_parameters import freeze
from tessera.train.rollouts.server_weights import ServerWeights
from tests.train.rollouts.completion_server import serving, sglang, vllm

SIZES = {"num_layers": 1, "d_model": 16, "mlp_dim": 16, "vocab_size": 16}
CONFIG = replace(config_of("tiny"), head_dim=4, **SIZES)
MODEL = DecoderModel(CONFIG)
LORA = DecoderModel(replace(CONFIG, lora=LoraConfig(rank=2)))
WITH_ADAPTERS = freeze(LORA, None, ())


@pytest.fixture
def server():
    with serving() as started:
        yield started


@pytest.fixture
def sent(server, tmp_path):
    """Weights for the server, of a kind."""

    def of(kind, model=MODEL, published=None):
        server.answer = sglang if kind == "sglang" else vllm
        setting = f"{kind}:{tmp_path / 'policy'}"
        return ServerWeights(
            setting, server.url, "tiny", model, published or Published()
        )

    return of


def complete(client):
    return client.complete([[1, 2]], [3], num_tokens=4)


def drawn(model, seed, mesh=None):
    """Parameters, those of adapters not 0 as at the beginning."""
    params = model.init(jax.random.key(seed), mesh)
    return jax.tree.map(lambda x: x + 0.01 * seed, params)


def test_sglang_has_the_weights_of_each_rollout(server, sent):
    weights = sent("sglang")
    for seed in (1, 2):
        params = drawn(MODEL, seed, Mesh(("fsdp", "tp"), range(4), (2, 2)))
        client = weights.send(params)
        assert len(complete(client)) == 1
        folder, _ = server.loaded[-1]
        assert server.version == client.weight_version == folder.name
        _, found = from_pretrained(folder)
        jax.tree.map(np.testing.assert_array_equal, found, params)
        # The one before is gone.
        assert [*folder.parent.iterdir()] == [folder]
    assert len({folder for folder, _ in server.loaded}) == 2


def test_sglang_has_adapters_in_its_weights(server, sent):
    params = drawn(WITH_ADAPTERS, 1)
    sent("sglang", WITH_ADAPTERS).send(params)
    _, found = from_pretrained(server.loaded[-1][0])
    kernel = params["decoder"]["mlp"]["up"]
    low = np.tensordot(kernel["lora_a"][0], kernel["lora_b"][0], axes=1)
    np.testing.assert_allclose(
        found["decoder"]["mlp"]["up"]["kernel"][0],
        kernel["kernel"][0] + WITH_ADAPTERS.config.lora.scale * low,
        rtol=1e-5,
    )


def test_vllm_has_adapters_under_a_new_name(server, sent):
    """It keeps the keys and values of prompts by the name of their adapters."""
    weights = sent("vllm", WITH_ADAPTERS)
    clients = [weights.send(drawn(WITH_ADAPTERS, seed)) for seed in (1, 2)]
    assert len({client.model for client in clients}) == 2
    complete(clients[-1])
    assert server.bodies[-1]["model"] == server.names[-1] == clients[-1].model
    (_, first), (folder, second) = server.loaded
    assert [*second] == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads(second["adapter_config.json"])["r"] == 2
    assert first["adapter_model.safetensors"] != second["adapter_model.safetensors"]
    assert [*folder.parent.iterdir()] == [folder]


def test_a_server_that_was_given_weights_before_is_given_those_of_a_resumed_run(
    server, sent
):
    """SGLang has the name of the folder that it loaded, and that run's folder stays."""
    sent("sglang").send(drawn(MODEL, 1))
    (before, _) = server.loaded[-1]
    assert server.names == [str(before)]
    complete(sent("sglang").send(drawn(MODEL, 2)))
    assert not before.exists()


def test_a_server_that_has_started_again_is_an_error(server, sent):
    client = sent("sglang").send(drawn(MODEL, 1))
    server.version = "default"
    with pytest.raises(ServerError, match="its weights are default, not tessera-"):
        complete(client)


def test_a_vllm_server_that_has_started_again_is_an_error(server, sent):
    client = sent("vllm", WITH_ADAPTERS).send(drawn(WITH_ADAPTERS, 1))
    server.names = ["tiny"]
    with pytest.raises(ServerError, match="status 404"):
        complete(client)


@pytest.mark.parametrize(
    ("kind", "status", "answer"),
    [
        ("sglang", 400, {"success": False, "message": "out of memory"}),
        ("sglang", 500, "out of memory"),
        ("vllm", 404, {"detail": "Not Found: out of memory"}),
        ("vllm", 500, {"error": {"message": "out of memory: max_lora_rank 4"}}),
    ],
)
def test_weights_that_are_refused_are_an_error_at_once(
    server, sent, kind, status, answer
):
    weights = sent(kind, WITH_ADAPTERS)
    server.refusal = status, answer
    with pytest.raises(ServerError, match=r"(?s)out of memory.*attempt 1,") as raised:
        weights.send(drawn(WITH_ADAPTERS, 1))
    assert f"{raised.value}".startswith(f"[T721] the server {server.url} does not")


def test_weights_that_cannot_be_written_are_an_error(server, sent, tmp_path):
    (tmp_path / "policy").write_text("a file")
    with pytest.raises(ServerError, match=r"cannot be written\n.*tessera-policy-"):
        sent("sglang").send(drawn(MODEL, 1))
    assert server.loaded == []


@pytest.mark.parametrize(
    "setting", ["/shared/policy", "sglang", "sglang:", "sglang:policy", "tgi:/policy"]
)
def test_a_setting_names_a_kind_and_a_folder(server, setting):
    with pytest.raises(SettingValueError, match="a kind of server and a folder"):
        ServerWeights(setting, server.url, "tiny", MODEL, Published())


def test_vllm_is_given_adapters_alone(sent):
    for model in (MODEL, LORA):
        with pytest.raises(SettingConflictError, match="takes new adapters, and no"):
            sent("vllm", model)


def test_a_server_of_other_weights_is_refused(sent):
    larger = Published({"model_type": "gemma3", "text_config": {}})
    with pytest.raises(SettingConflictError, match="'gemma3', and the run trains its"):
        sent("sglang", published=larger)
    unknown = DecoderModel(replace(CONFIG, post_norms=False, logit_soft_cap=3.0))
    with pytest.raises(ModelFolderError, match="no family"):
        sent("sglang", unknown)
