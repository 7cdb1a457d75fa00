# SPDX-License-Identifier: Apache-2.0
"""The trainer: an application of the layer, which does not know it.

commands/                       ``tessera train``, ``plan``, ``report``, …
planner/                        chooses the layout of a run
loop/                           builds a run and steps through it
config/                         settings: their schema, checks and overrides
checkpoints/  data/  trackers/  rewards/
models/                         the decoder, the models of others, their weights
runtime/                        processes: launching, rendezvous, signals
report/  records/               what a run writes, as a page and as lines
files/                          files that anyone may have written
"""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
