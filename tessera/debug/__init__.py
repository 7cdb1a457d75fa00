# SPDX-License-Identifier: Apache-2.0
"""Debugging tools for steps: explain, profile, compare across meshes."""
