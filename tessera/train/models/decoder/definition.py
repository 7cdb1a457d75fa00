# SPDX-License-Identifier: Apache-2.0
"""The decoder as a kind of model that runs can choose; imports no JAX."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.definition import DECODER, ModelDefinition, ModelOptions

if TYPE_CHECKING:
    from tessera.mesh import Mesh
    from tessera.train.models.decoder.decoder_model import DecoderModel
    from tessera.train.models.partition_rules import Method


class DecoderDefinition(ModelDefinition):
    """``DecoderConfig`` and ``DecoderModel``."""

    name = DECODER
    config_class = DecoderConfig

    def build(
        self, config: DecoderConfig, options: ModelOptions, mesh: "Mesh | None"
    ) -> "DecoderModel":
        """The model, with the stages of a mesh that has ``pp``."""
        from tessera.train.models.decoder.decoder_model import DecoderModel
        from tessera.train.models.pipeline_stages import split_of

        return DecoderModel(
            config,
            sequence_parallel=options.sequence_parallel,
            context_parallel=cast("Method", options.context_parallel),
            remat=options.remat,
            dtype=options.dtype,
            fp8=options.fp8,
            split=split_of(
                mesh, config, options.pipeline_chunks, options.pipeline_placement
            ),
        )

    def widths(self, config: DecoderConfig, length: int) -> Mapping[str, int]:
        """Numbers that the largest activations have for each token, by their names."""
        return {
            "the logits": config.vocab_size,
            "the hidden layer": config.mlp_dim * max(config.num_experts, 1),
            "the heads": config.num_heads * config.head_dim,
            "the scores of attention": config.num_heads * length,
        }

    def row_coupling(self, config: DecoderConfig) -> str | None:
        """Routers, which balance the tokens of a whole batch."""
        if not config.num_experts:
            return None
        return f"num_experts={config.num_experts}, whose routers balance a whole batch"

    def incompatibilities(
        self, config: DecoderConfig, saved: DecoderConfig
    ) -> Iterator[str]:
        """The scale of adapters."""
        if config.lora.rank and config.lora.rank == saved.lora.rank:
            scales = saved.lora.scale, config.lora.scale
            if scales[0] != scales[1]:
                yield (
                    f"alpha / rank of model.lora: saved {scales[0]:g}, this run "
                    f"{scales[1]:g}"
                )

    def unused_settings(self, config: DecoderConfig) -> Iterator[tuple[str, str]]:
        """What is about experts or adapters, in a model without them."""
        if not config.lora.rank:
            yield "model.lora.alpha model.lora.targets", "model.lora.rank=0"
        if not config.num_experts:
            yield (
                "model.experts_per_token model.router_balance_weight "
                "model.router_z_weight",
                "model.num_experts=0",
            )
