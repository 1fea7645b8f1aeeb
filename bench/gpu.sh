#!/usr/bin/env bash
# What a machine with an accelerator is asked, in less than ten minutes per call.
#   bench/gpu.sh          the tests that need an accelerator, then the first part of the sweep
#   bench/gpu.sh more     the sweep goes on where the last call stopped; again until nothing is "not run"
# The report and what the tests print go to $OUT (bench/results); a report in bench/results is gone on with where $OUT
# has none. Further arguments go to bench.sweep, as in --only "part eager".
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-bench/results}
python=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
failed=0
mkdir -p "$out"
if [ "${1:-}" = more ]; then
    shift
    minutes=9
    set -- --continue "$@"
    [ -e "$out/sweep.json" ] || [ ! -e bench/results/sweep.json ] || cp bench/results/sweep.json "$out/"
else
    minutes=6.5
    # Only these files: others need packages that no test of a device does. SIGINT lets pytest say what it has found.
    mapfile -t files < <(grep -rl 'mark\.gpu' tests --include 'test_*.py')
    timeout --signal INT --kill-after 20 140 "$python" -m pytest -m gpu --tb short -o faulthandler_timeout=100 \
        "${files[@]}" 2>&1 | tee "$out/gpu_tests.log" || failed=1
fi
timeout --kill-after 10 "$(awk "BEGIN {print int($minutes * 60 + 20)}")" \
    "$python" -m bench.sweep --minutes "$minutes" --json "$out/sweep.json" "$@" || failed=1
exit "$failed"
