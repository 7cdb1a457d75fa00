# SPDX-License-Identifier: Apache-2.0
"""What a run keeps of itself, so that another process can go on with it bit for bit.

manifest     checksums of every file of a checkpoint, and whether they hold
folder       the checkpoints of a run on disk: listed, set aside, removed
metadata     what a checkpoint says of itself: arrays, mesh, cursor, configuration
storage      arrays to files and back, by Orbax; nothing else knows it
saving       checkpoints written behind the training loop
resuming     which checkpoint a run goes on with
restoring    the arrays of a checkpoint on the mesh of this run
plan         what restoring would read and move, before anything is allocated
exporting    the parameters of one as a safetensors file
"""
