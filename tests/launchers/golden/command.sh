#!/bin/bash
#SBATCH --job-name=hpcmoe-abc123
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=/scratch/me/runs/abc123/sbatch/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --export=ALL
#SBATCH --time=00:30:00
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=1

# Written by hpcmoe. One start of this script is one attempt of the run.
set -u
PYTHON=/opt/hpcmoe/bin/python
RUN_DIR=/scratch/me/runs/abc123
job=$SLURM_JOB_ID
export HPCMOE_RUN_DIR=$RUN_DIR HPCMOE_ATTEMPT=$job.${SLURM_RESTART_COUNT:-0}
attempt_dir=$RUN_DIR/attempts/$HPCMOE_ATTEMPT

# A signal is a request to save and leave. It is noted, told to the ranks, and never ends this shell:
# what must be done after the ranks have gone is done here.
heard=
ranks=
hear() {
  [[ " $heard " == *" $1 "* ]] || heard="${heard:+$heard }$1"
  [[ -d $attempt_dir ]] && : >>"$attempt_dir/notice"
  [[ -n $ranks ]] && kill -USR2 $ranks 2>/dev/null
}
for signal in USR1 USR2 TERM INT; do
  trap "hear $signal" "$signal"
done
trap '' HUP

# A signal interrupts `wait`; this returns when the process has really gone, with its own exit code in rc.
await() {
  while kill -0 "$1" 2>/dev/null; do wait "$1"; done
  wait "$1"
  rc=$?
}

# In the background, and deaf to signals: Slurm sends them to everything in the job.
shielded() {
  (trap '' USR1 USR2 TERM INT; exec "$@") &
  await $!
}

# Takes the run for this attempt. 3: nothing to do here, as the run is over or another job holds it.
arrive() {
  shielded "$PYTHON" -m hpcmoe.runs.arrive "$RUN_DIR"
  [[ $rc -eq 3 ]] && exit 0
  [[ $rc -eq 0 ]] || exit "$rc"
}

# Journals why this attempt ended, and sees to what follows.
depart() {
  shielded "$PYTHON" -m hpcmoe.runs.depart "$RUN_DIR" --rc "$rc" --heard "$heard"
}

# What a surrounding job or launcher may have left here would steer srun and torch.
unset MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK
unset ${!SLURM_CPU_BIND@} ${!SRUN_@} ${!SBATCH_@} ${!PMI_@} ${!PMIX_@} ${!OMPI_@} ${!TORCHELASTIC_@}
export OMP_NUM_THREADS=1

arrive

# The ranks meet on the first node. A name that does not resolve must not give each rank a world of its own.
nodes=$SLURM_JOB_NUM_NODES
left_out=
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | head -n 1)
host=${host:-$SLURMD_NODENAME} # the batch shell's own node, which is the first one
meet() {
  export MASTER_ADDR=127.0.0.1
  MASTER_PORT=$("$PYTHON" -m hpcmoe.slurm.port)
  export MASTER_PORT
}
meet

rc=0
if ! getent ahosts "$MASTER_ADDR" >/dev/null; then
  reason="the first node's address '$MASTER_ADDR' does not resolve on $(uname -n); set cluster.master_addr"
  echo "hpcmoe: $reason" >&2
  printf '{"verdict": "failed", "step": 0, "source": null, "reason": "%s"}\n' "${reason//[\"\\]/}" >"$attempt_dir/verdict.json"
  rc=2
fi

if [[ $rc -eq 0 && -z $heard ]]; then
  # Where Slurm's controller does not answer, it may be restarting: to ask it again costs less than an attempt.
  for pause in 5 15 40 0; do
    # USR2 is ignored until a rank listens: the notice file tells it of what came before.
    srun --nodes="$nodes" \
      --ntasks=$((nodes * 1)) \
      --ntasks-per-node=1 \
      --cpus-per-task=1 \
      ${left_out:+"--exclude=$left_out"} \
      --kill-on-bad-exit=1 \
      --wait=60 \
      --export=ALL \
      --mpi=none \
      --input=none \
      --open-mode=append \
      --output="${attempt_dir//%/%%}/rank-%4t.log" \
      bash -c 'trap "" USR2; exec "$@"' rank "$PYTHON" -u -m hpcmoe.engine.command "$RUN_DIR" 2>"$attempt_dir/srun.log" &
    ranks=$!
    await "$ranks"
    ranks=
    cat "$attempt_dir/srun.log" >&2
    [[ $rc -ne 0 && -z $heard && $pause -gt 0 ]] || break
    grep -Eqi 'contact slurm controller|timed out|authentication' "$attempt_dir/srun.log" || break
    compgen -G "$attempt_dir/rank-*.log" >/dev/null && break  # it has begun
    sleep "$pause" &
    wait $!  # a signal ends it
    [[ -z $heard ]] || break
  done
fi

depart
exit "$rc"
