# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: router, experts, and the exchange of tokens between devices.

operation    op.moe: declares the parameters
layer        the layer on explicit weights, one SPMD region
  routing      top-k router, its losses and statistics
  dropless     every assignment is computed, in rounds
    experts      gated MLPs, all-to-all
      blocks       experts on groups of rows, on GPUs
"""
