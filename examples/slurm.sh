#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A run that saves before Slurm ends it, and that is queued again until it is done.
#
#   sbatch --ntasks=8 --gpus-per-task=1 --time=24:00:00 examples/slurm.sh model=gemma3_1b
#
# Each task is a rank. Submit it from the repository; PYTHON is that of Tessera, and further
# arguments are settings.
#SBATCH --signal=TERM@120 --requeue --open-mode=append

code=0
srun --kill-on-bad-exit=1 "${PYTHON:-python}" run_training.py \
  hydra.run.dir="outputs/slurm/$SLURM_JOB_ID" training.resume=auto runtime.grace_period=90 \
  "$@" || code=$?
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
