# SPDX-License-Identifier: Apache-2.0
"""The settings of a run: their schema, checks, conflicts and overrides."""
