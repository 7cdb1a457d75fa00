# SPDX-License-Identifier: Apache-2.0
"""Chooses the mesh and the settings of a training step for a machine."""
