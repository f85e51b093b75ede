#!/bin/bash
# 64 devices: 1 slice of v5p-4x4x4. CLUSTER: the GKE cluster; options of xpk's may follow: --project, --zone.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck disable=SC2016,SC1003  # the rank's own shell expands what is quoted; a lone backslash is meant
xpk workload create --cluster "${CLUSTER:?the name of the GKE cluster}" \
  --workload zoo-gpt2 \
  --tpu-type v5p-4x4x4 \
  --num-slices 1 \
  --base-docker-image gcr.io/p/jax:1 \
  --script-dir . \
  --max-restarts 3 \
  --storage bucket \
  --command 'python3 p.py --coordinator auto --steps 100 --checkpoints '"'"'/data/it'"'"'"'"'"'"'"'"'s here'"'"'' "$@"
