# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: a router, experts, and the way of tokens between devices.

operation    op.moe: declares the parameters
layer        the core: one manual region, on explicit weights
  routing      top-k router, its losses and statistics
  dropless     every choice computed, in rounds
  limited      a capacity for each expert
    exchange     all-to-all, in one hop or several
    experts      gated MLPs, many in one matmul
reference    every expert on every token: what the others are tested against
"""
