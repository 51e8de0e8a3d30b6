#!/bin/bash
# gpt_160m: the plan is in /shared/runs/one/plan.yaml
# docker stop saves and ends it.
set -euo pipefail
exec docker run \
  --rm \
  --name=gpt-160m-20261201-103341-a1b2 \
  --gpus=8 \
  --user="$(id -u):$(id -g)" \
  --env=HOME=/tmp --env=USER="$(id -un)" \
  --stop-timeout=600 \
  --shm-size=8g \
  --ulimit=memlock=-1 --ulimit=stack=67108864 \
  --volume=/shared/runs/one:/shared/runs/one \
  --volume='/data/a corpus:/data/a corpus:ro' \
  --volume=/shared/runs/one/container:/opt/ml \
  --volume=/models:/models:ro \
  --env=SLIPWAY_HOSTS=localhost --env=SLIPWAY_HOST=localhost \
  --env=NCCL_DEBUG=INFO \
  --env='GREETING=it'"'"'s me' \
  --cpuset-cpus=0-63 \
  slipway:1a2b
