# SPDX-License-Identifier: Apache-2.0
"""Where the names of this package come from; see ``tessera/_lazy.py``."""

from tessera.train.models.axis_rules import RULES as RULES
from tessera.train.models.decoder.config import DecoderConfig as DecoderConfig
from tessera.train.models.decoder.decoder_model import DecoderModel as DecoderModel
from tessera.train.models.named_models import config_of as config_of
from tessera.train.models.named_models import model_names as model_names
from tessera.train.models.partition_rules import Placement as Placement
from tessera.train.models.register_model import register_model as register_model
from tessera.train.models.weights import from_pretrained as from_pretrained
from tessera.train.models.weights import save_pretrained as save_pretrained
