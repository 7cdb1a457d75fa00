# SPDX-License-Identifier: Apache-2.0
"""Published model families: how their folders name configuration and weights.

A family is one file: it reads and writes the values of ``config.json``, and has a table
of the names of its tensors. Nothing here imports JAX.
"""
