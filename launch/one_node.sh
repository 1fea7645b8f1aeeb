#!/usr/bin/env bash
# What slurm.sbatch does, on one machine without Slurm: check it, stage and verify the data, train NEXP times, score.
#
#   NEXP=10 launch/one_node.sh configs/schnell_gbs512.toml [--section.key=value]
#
# From the root of the repository. Variables as in slurm.sbatch: NEXP (1), SEED (drawn once), RESULTS (results/<config>),
# GPUS_PER_NODE (all; 1 on the CPU), PREFLIGHT="arguments" or off, STAGE="SRC DST", VERIFY=DIR, SCORE="arguments" or off.
# The same command again skips what is done and goes on with the rest.
set -euo pipefail

say() { printf '%(%F %T)T %s\n' -1 "$*"; }
die() { say "ends: $*"; exit 1; }

if [[ $# -eq 0 || $1 == -* ]]; then
  echo "usage: NEXP=10 launch/one_node.sh CONFIG [--section.key=value ...]; launch/README.md lists the variables"
  exit 2
fi
[[ -f train.py ]] || die "run from the root of the repository"
config=$1
if [[ ! -f $config ]]; then
  echo "config $config is no file; give one, such as configs/schnell_gbs512.toml"
  exit 2
fi
shift
results=${RESULTS:-results/$(basename "$config" .toml)}
for program in python torchrun; do
  command -v "$program" >/dev/null || die "$program is not in PATH; activate the environment that has requirements.txt"
done
gpus=${GPUS_PER_NODE:-$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')}
mkdir -p "$results/logs"
[[ ! -e /dev/kfd ]] || export HSA_NO_SCRATCH_RECLAIM=1 # some versions of RCCL refuse to start without it
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT # in a container all dies with this script, also a save
trap 'exit 143' TERM

if [[ ! -e $results/seeds.txt ]]; then
  first=${SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
  seq "$first" "$((first + ${NEXP:-1} - 1))" >"$results/.seeds.txt"
  mv "$results/.seeds.txt" "$results/seeds.txt"
fi
mapfile -t seeds <"$results/seeds.txt"
((${#seeds[@]} == ${NEXP:-1})) || die "$results/seeds.txt is for ${#seeds[@]} runs, NEXP=${NEXP:-1}; set another RESULTS"

if [[ ${PREFLIGHT:-} != off ]]; then
  # shellcheck disable=SC2086 # several arguments
  torchrun --standalone --nproc-per-node "$gpus" -m tools.preflight ${PREFLIGHT:-} || die "this machine is unfit"
fi
if [[ -n ${STAGE:-} ]]; then
  # shellcheck disable=SC2086 # two folders
  launch/stage.sh $STAGE || die "staging failed"
fi
if [[ -n ${VERIFY:-} ]]; then
  python -m tools.prepare verify "$VERIFY" --fast --config "$config" || die "the data set does not pass; the lines above say why"
fi

for ((run = 0; run < ${NEXP:-1}; run++)); do
  if [[ ! -e $results/run_$run/outcome.json ]]; then
    attempt=0
    while [[ -e $results/logs/run_$run.$attempt.log ]]; do attempt=$((attempt + 1)); done
    log=$results/logs/run_$run.$attempt.log
    say "run $run of ${NEXP:-1}, seed ${seeds[run]}: $log"
    torchrun --standalone --nproc-per-node "$gpus" --max-restarts 3 train.py "$config" "$@" \
      --run.dir="$results/run_$run" --train.seed="${seeds[run]}" >"$log" 2>&1 &
    wait $! || die "run $run failed with exit code $?: $(grep -ao 'train.py: .*' "$log" | tail -n 1 | grep . || tail -n 1 "$log"), see $log"
  fi
  cp "$results/run_$run/result_0.txt" "$results/.result_$run.txt"
  mv "$results/.result_$run.txt" "$results/result_$run.txt"
  say "run $run is done: $(cat "$results/run_$run/outcome.json")"
  ! grep -q '"not_a_timed_result": ".*\(resumed\|the clock\)' "$results/run_$run/outcome.json" ||
    say "run $run is no timed result; to repeat it, delete $results/run_$run and give the same command again"
done
if [[ ${SCORE:-} != off ]]; then
  # shellcheck disable=SC2086 # several arguments
  python -m tools.report "$results" ${SCORE:-} || (($? == 1)) # 1: the report says what is not valid
  # shellcheck disable=SC2086
  python -m tools.report "$results" --out "$results/report" ${SCORE:-} >/dev/null || (($? == 1)) ||
    say "the report's page is missing; the line above says why"
fi
