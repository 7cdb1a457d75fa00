#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A run on one to three machines that may come and go, by torchrun's elastic agents.
#
#   HOST=192.168.1.10 examples/torchrun_elastic.sh --first   # on that machine, which stays
#   HOST=192.168.1.10 examples/torchrun_elastic.sh           # on each of the others
#
# TORCHRUN is a torchrun of any environment, PYTHON that of Tessera, and FOLDER of the run is on a file
# system that all machines share. Further arguments are settings.
set -eu
first=false
if [ "${1:-}" = --first ]; then first=true; shift; fi

# With a shared store, torch's agents do not tell one that comes later its address.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${TORCHRUN:-torchrun}" --no-python --nnodes=1:3 --nproc-per-node=1 --max-restarts=100 \
  --rdzv-backend=c10d --rdzv-endpoint="${HOST:-127.0.0.1}:${PORT:-29400}" --rdzv-id=tessera \
  --rdzv-conf="is_host=$first,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3" \
  "${PYTHON:-python}" run_training.py \
  'model.mesh_shape=[[-1],[dp]]' training.global_batch_size=96 training.checkpoint_every=50 \
  hydra.run.dir="${FOLDER:-outputs/elastic}" training.resume=auto "$@"
