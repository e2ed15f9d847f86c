#!/bin/bash
# Serves one model on the nodes of a Slurm allocation. The first node runs the api and the supervisor:
#   sbatch --nodes=2 deploy/slurm.sh orpheus --gpus auto:2
# Arguments go to `mstarctl up`. Every node needs mstarctl[ray] and the plugin at the same path, and the same versions.
#SBATCH --job-name=mstar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --exclusive
#SBATCH --time=08:00:00
# Slurm sends SIGTERM to this script 180 s before the time limit, so that requests in flight finish.
#SBATCH --signal=B:TERM@180
set -euo pipefail

: "${SLURM_JOB_ID:?start this script with sbatch}"
model=${1:?name the model: sbatch deploy/slurm.sh MODEL [OPTIONS of mstarctl up]}
shift

export RAY_USAGE_STATS_ENABLED=0
export MSTAR_RUNTIME_DIR=${MSTAR_RUNTIME_DIR:-/tmp/mstar-$SLURM_JOB_ID}
address=$(getent ahostsv4 "$SLURMD_NODENAME" | awk 'NR == 1 { print $1 }') || true
: "${address:?$SLURMD_NODENAME has no IPv4 address}"
port=${RAY_PORT:-6379}
# No tensor passes through Ray: its object store stays at the smallest size.
node_options=(--object-store-memory=80000000 --num-cpus="${SLURM_CPUS_PER_TASK:-16}" --disable-usage-stats)
server=
nodes=
asked=

# shellcheck disable=SC2317 # called by traps
end() {
    asked=yes
    if [ -n "$server" ]; then kill -TERM "$server" 2>/dev/null || true; fi
}
# shellcheck disable=SC2317
finish() {
    trap - EXIT
    if [ -n "$nodes" ]; then kill -TERM "$nodes" 2>/dev/null || true; fi
    ray stop --grace-period 5 >/dev/null 2>&1 || true
}
trap end TERM INT
trap finish EXIT

ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false "${node_options[@]}"
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --relative=1 \
        ray start --address="$address:$port" --block "${node_options[@]}" &
    nodes=$!
fi

# The plan needs all nodes: wait until each has joined, for up to two minutes.
for _ in $(seq 60); do
    joined=$(mstarctl hosts --ray "$address:$port" -o name 2>/dev/null | wc -l) || joined=0
    if [ "$joined" -ge "$SLURM_JOB_NUM_NODES" ]; then break; fi
    sleep 2
done

mstarctl up "$model" --ray "$address:$port" --host 0.0.0.0 "$@" &
server=$!
# A trapped signal ends `wait` early: wait again until the server has drained.
status=0
wait "$server" || status=$?
while kill -0 "$server" 2>/dev/null; do
    status=0
    wait "$server" || status=$?
done
if [ -n "$asked" ] && [ "$status" -eq 130 ]; then status=0; fi # the exit status of `up` after a signal
exit "$status"
