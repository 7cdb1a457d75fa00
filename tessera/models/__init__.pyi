# SPDX-License-Identifier: Apache-2.0
"""Where the names of this package come from; see ``tessera/_lazy.py``."""

from tessera.models.axis_rules import RULES as RULES
from tessera.models.decoder.config import DecoderConfig as DecoderConfig
from tessera.models.decoder.decoder import Decoder as Decoder
from tessera.models.decoder.model import DecoderModel as DecoderModel
from tessera.models.generation import Sampler as Sampler
from tessera.models.generation import generate as generate
from tessera.models.partition_rules import Placement as Placement
from tessera.models.registered_model import register_model as register_model
from tessera.models.registry import build as build
from tessera.models.registry import config_of as config_of
from tessera.models.registry import model_names as model_names
from tessera.models.weights import from_pretrained as from_pretrained
from tessera.models.weights import save_pretrained as save_pretrained
