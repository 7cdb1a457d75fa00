# SPDX-License-Identifier: Apache-2.0
"""``ServerWeights``: gives a server the weights that it samples with."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final
from uuid import uuid4

import jax
from jax.experimental import multihost_utils

from tessera.errors import ServerError, SettingConflictError, SettingValueError
from tessera.foundations.tree import Tree, named_leaves, nest
from tessera.train.checkpoints.first_process import broadcast_from_first
from tessera.train.models.families.published_files import Published
from tessera.train.models.merge_adapters import merge_adapters
from tessera.train.models.model import Model
from tessera.train.models.weights import stored_parameters
from tessera.train.models.write_folder import write_adapters, write_folder
from tessera.train.rollouts.openai_server import OpenAIServer

_NAME: Final = "tessera-policy-"


class ServerWeights:
    """Gives a server the weights of each rollout, by files that both see.

    They are written into a new folder, which the server is then told to load, and which
    replaces the one before. Nobody may ask the server for completions meanwhile. With
    several processes of JAX each contributes its shards; the first writes and asks.

    An SGLang server loads all weights, with adapters merged, and forgets its prefix
    cache; start it without ``--hicache-storage-backend``, whose storage it does not
    empty. A vLLM server loads adapters alone, for the weights that the run began with:
    each time under a new name, because its prefix cache tells adapters by their names.
    It offers no way to replace all weights that says whether its prefix cache is empty.

    Args:
      setting: ``sglang:<folder>`` or ``vllm:<folder>``: the kind of server, and a
        folder for this run alone, which the server sees by the same path.
      url: As for ``OpenAIServer``.
      served: The name of the model that the server serves.
      model: Of the parameters.
      published: What the run began with says beside its weights.

    Raises:
      SettingValueError: [T502] the setting is something else.
      SettingConflictError: [T507] vLLM would get more than adapters, or the run began
        with a part of a larger model, which has other names for its weights.
      ModelFolderError: [T806] no family of Transformers computes this model.
      ServerError: [T721] there is no such server, or it does not serve the model.
    """

    def __init__(
        self, setting: str, url: str, served: str, model: Model, published: Published
    ) -> None:
        kind, _, folder = setting.partition(":")
        if kind not in ("sglang", "vllm") or not Path(folder).is_absolute():
            raise SettingValueError(
                "grpo.server_weights needs a kind of server and a folder",
                got=setting,
                fix="write sglang:/shared/policy, or vllm:/shared/policy for adapters",
            )
        self._folder, self._model = Path(folder), model
        self._is_vllm = kind == "vllm"
        trained = named_leaves(model.abstract()).keys() - model.frozen - model.adapters
        if self._is_vllm and (trained or not model.adapters):
            raise SettingConflictError(
                "a vLLM server takes new adapters, and no other weights",
                got=f"grpo.server_weights={setting}, and the run trains "
                f"{len(trained)} arrays that are no adapters",
                fix="train adapters: model.lora.rank=16; or sample with SGLang",
            )
        self._values = published.config_values(model.config, {})
        whole, own = published.config.get("model_type"), self._values["model_type"]
        if whole not in (None, own):
            raise SettingConflictError(
                "a server of a larger model has other names for the weights",
                got=f"model_type = {whole!r}, and the run trains its {own!r}",
                fix="begin with the weights of the text model, and serve that",
            )
        version = None if self._is_vllm else ""
        self._server = OpenAIServer(url, served, weight_version=version)

    def send(self, params: Tree) -> OpenAIServer:
        """The server with these parameters.

        With several processes of JAX, all of them call this.

        Raises:
          ServerError: [T721] they cannot be written, or the server does not load them.
        """
        leaves = named_leaves(params)
        # The shapes of the others are enough, but for what is stored by stages.
        is_part = self._is_vllm and self._model.split is None
        sent = self._model.adapters if is_part else leaves.keys()
        whole = nest({n: _whole(x) if n in sent else x for n, x in leaves.items()})
        name = broadcast_from_first(lambda: {"name": self._load(whole)})["name"]
        if self._is_vllm:
            return replace(self._server, model=name)
        return replace(self._server, weight_version=name)

    def _load(self, params: Tree) -> str:
        """Write parameters, and let the server load them; the name that they have."""
        folder = self._folder / f"{_NAME}{uuid4().hex}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(params, folder)
        except OSError as error:
            raise ServerError(
                "the weights for the server cannot be written",
                got=f"{folder}: {error}",
                fix="name a folder with room in grpo.server_weights",
            ) from error
        if self._is_vllm:
            body = {"lora_name": folder.name, "lora_path": str(folder)}
            self._server.load("load_lora_adapter", body)
        else:
            body = {"model_path": str(folder), "weight_version": folder.name}
            # Not below /v1. Without the cache, no prompt has old keys and values.
            path = "../update_weights_from_disk"
            self._server.load(path, body | {"flush_cache": True})
        for other in self._folder.glob(f"{_NAME}*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return folder.name

    def _write(self, params: Tree, folder: Path) -> None:
        config, values = self._model.config, self._values
        layouts, read = stored_parameters(params, self._model)
        if self._is_vllm:
            kind = values["model_type"]
            write_adapters(folder, config, layouts, read, base=None, model_type=kind)
        else:
            layouts, read = merge_adapters(config, layouts, read)
            write_folder(folder, config, layouts, read, values=values)


def _whole(array: jax.Array) -> object:
    """An array of which each process has a part, on the host of the first."""
    if array.is_fully_addressable:
        return array
    value = multihost_utils.process_allgather(array, tiled=True)
    return None if jax.process_index() else value
