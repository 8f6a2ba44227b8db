#!/bin/bash
# A run on Slurm: sbatch --nodes=2 examples/cluster/slurm.sh gsm8k_team_2x8xA100 trainer.default_local_dir=/shared/runs/first
#
# Recipe, data, model and run folder lie on a file system that all nodes share. The first node is Ray's head and runs
# the command; the run ends with the job. A requeued job goes on from the last checkpoint (trainer.save_freq).
#SBATCH --job-name=creditflow
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
set -euo pipefail
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

port=6379
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | cut -d' ' -f1)

srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
    ray start --head --node-ip-address="$head" --port=$port --num-cpus="$SLURM_CPUS_PER_TASK" --block &
until srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
        ray status --address="$head:$port"; do
    sleep 5
done
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap \
        ray start --address="$head:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
done

joined="import ray; ray.init('$head:$port', logging_level='error'); print(sum(node['Alive'] for node in ray.nodes()))"
until [ "$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap python -c "$joined")" = "$SLURM_JOB_NUM_NODES" ]; do
    sleep 5
done
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
    creditflow train "$@" "ray_kwargs.ray_init.address=$head:$port" \
    --engine verl -- "trainer.nnodes=$SLURM_JOB_NUM_NODES"
