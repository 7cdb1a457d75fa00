# SPDX-License-Identifier: Apache-2.0
"""Saves and restores checkpoints, so that a run resumes bit for bit.

manifest            checksums of every file of a checkpoint
checkpoint_folder   lists, quarantines and removes the checkpoints of a run
metadata            describes a checkpoint: arrays, mesh, data cursor, configuration
storage             writes and reads arrays; the only module that uses Orbax
saving              writes checkpoints in the background of the training loop
choose_checkpoint   selects the checkpoint that a run resumes from
restore_arrays      restores a checkpoint on the mesh of this run
export_checkpoint   exports the parameters to a safetensors file
loop_checkpoint     saves and restores the state of a user's own loop
loop_leaves         what of such a state is stored, and the state made from it
first_process       what the first process finds or does, in every process
"""
