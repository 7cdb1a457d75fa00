# SPDX-License-Identifier: Apache-2.0
"""The machine that a run is on: its devices, and (alone) its environment variables."""
