# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers of other people, to which a run sends its numbers.

tracking        when they are called, in a thread, and the run's id in its folder
wandb_tracker   Weights & Biases
mlflow_tracker  MLflow
"""
