# SPDX-License-Identifier: Apache-2.0
"""Leaves out the programs that run where PyTorch and TRL are."""

collect_ignore_glob = ["trl_*.py"]
