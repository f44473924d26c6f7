#!/bin/bash
# Written by hpcmoe. Runs the attempts of one run on this machine, until the run is over or told to stop (kill -TERM).
set -u
PYTHON=/opt/hpcmoe/bin/python
RUN_DIR=/scratch/me/runs/abc123
WORLD_SIZE=4
export HPCMOE_RUN_DIR=$RUN_DIR WORLD_SIZE LOCAL_WORLD_SIZE=$WORLD_SIZE MASTER_ADDR=127.0.0.1
attempt_dir=

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

export OMP_NUM_THREADS=1

# Ranks die with this script: one that went on alone would train beside the run's next attempt.
with_parent=()
command -v setpriv >/dev/null && with_parent=(setpriv --pdeathsig KILL)

start_rank() {
  # USR2 is ignored until a rank listens: the notice file tells it of what came before.
  (
    trap '' USR2
    export RANK=$1 LOCAL_RANK=$1
    exec "${with_parent[@]}" "$PYTHON" -u -m hpcmoe.engine "$RUN_DIR" \
      </dev/null >>"$attempt_dir/rank-$(printf %04d "$1").log" 2>&1
  ) &
  ranks="${ranks:+$ranks }$!"
}

# Until every rank has gone; rc is the first bad exit code. When a rank fails the others are told to leave (TERM);
# 60 s after the first one left, whoever is still there is killed.
await_ranks() {
  local pid left worst=0 deadline=
  while [[ -n $ranks ]]; do
    left=
    for pid in $ranks; do
      if kill -0 "$pid" 2>/dev/null; then
        left="${left:+$left }$pid"
        continue
      fi
      wait "$pid" 2>/dev/null
      rc=$?
      [[ -n $deadline ]] || deadline=$((SECONDS + 60))
      [[ $rc -eq 0 || $worst -ne 0 ]] && continue
      echo "hpcmoe: a rank of attempt $HPCMOE_ATTEMPT left with exit code $rc; the others are told to leave" >&2
      worst=$rc
      kill -TERM $ranks 2>/dev/null
    done
    ranks=$left
    [[ -n $ranks && -n $deadline && $SECONDS -ge ${deadline:-0} ]] && kill -KILL $ranks 2>/dev/null
    [[ -n $ranks ]] && sleep 0.3
  done
  rc=$worst
}

restart=0
while :; do
  export HPCMOE_ATTEMPT=local-$$.$restart
  attempt_dir=$RUN_DIR/attempts/$HPCMOE_ATTEMPT
  arrive

  rc=0
  if [[ -z $heard ]]; then
    MASTER_PORT=$("$PYTHON" -m hpcmoe.slurm.port)
    export MASTER_PORT
    for ((rank = 0; rank < WORLD_SIZE; rank++)); do start_rank "$rank"; done
    await_ranks
  fi

  depart
  # 85: start again.
  [[ $rc -eq 85 ]] || exit "$rc"
  restart=$((restart + 1))
  heard=
done
