#!/usr/bin/env bash
# What a machine with an accelerator is asked, in less than ten minutes per call: bench.sweep, tests included.
# Call it again until nothing is "not run": each call goes on where the last one stopped or was killed.
# Results are sweep.json and gpu_tests.jsonl in $OUT (bench/results). An empty $OUT first gets those of bench/results.
# Arguments go to bench.sweep, as in --only "part eager".
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-bench/results}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
mkdir -p "$out"
for name in sweep.json gpu_tests.jsonl; do
    [ -e "$out/$name" ] || [ ! -e "bench/results/$name" ] || cp "bench/results/$name" "$out/"
done
exec timeout --kill-after 10 580 \
    "${PYTHON:-python3}" -m bench.sweep --minutes 9.0 --json "$out/sweep.json" "$@"
