#!/usr/bin/env bash
# What a machine with an accelerator is asked, in less than ten minutes per call.
#   bench/gpu.sh          the tests that need an accelerator, then the first part of the sweep
#   bench/gpu.sh more     the sweep goes on where the last call stopped; again until nothing is "not run"
# The report goes to $OUT (bench/results). Further arguments go to bench.sweep, as in --only "part eager".
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-bench/results}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
failed=0
if [ "${1:-}" = more ]; then
    shift
    minutes=9
    set -- --continue "$@"
else
    minutes=6.5
    timeout --kill-after 10 150 python -m pytest -m gpu --timeout 120 || failed=1
fi
timeout --kill-after 10 "$(awk "BEGIN {print int($minutes * 60 + 20)}")" \
    python -m bench.sweep --minutes "$minutes" --json "$out/sweep.json" "$@" || failed=1
exit "$failed"
