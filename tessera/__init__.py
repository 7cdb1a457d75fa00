# SPDX-License-Identifier: Apache-2.0
"""Tessera: write a step for one device, declare a mesh, run it on any."""
