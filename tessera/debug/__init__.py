# SPDX-License-Identifier: Apache-2.0
"""Tools that show what a step became: explain, profile, compare across meshes."""
