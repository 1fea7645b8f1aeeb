#!/usr/bin/env bash
# What a machine with an accelerator is asked, in less than ten minutes per call: the tests that need an accelerator,
# then the sweep. Call it again until nothing is "not run": each call goes on where the last one stopped or was killed.
# The report and what the tests print go to $OUT (bench/results); results in bench/results are gone on with where $OUT
# has none. Arguments go to bench.sweep, as in --only "part eager".
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-bench/results}
python=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
failed=0
mkdir -p "$out"
for name in sweep.json gpu_tests.log; do
    [ -e "$out/$name" ] || [ ! -e "bench/results/$name" ] || cp "bench/results/$name" "$out/"
done
log=$out/gpu_tests.log
commit="commit $(git rev-parse HEAD 2>/dev/null || echo unknown)"
if [ "$(head -n 1 "$log" 2>/dev/null)" = "$commit" ]; then
    minutes=9
else
    minutes=6.5
    # Only these files: others need packages that no test of a device does. SIGINT lets pytest say what it has found.
    mapfile -t files < <(grep -rl 'mark\.gpu' tests --include 'test_*.py')
    echo "$commit" >"$log.part"
    timeout --signal INT --kill-after 20 140 "$python" -m pytest -m gpu --tb short -o faulthandler_timeout=100 \
        "${files[@]}" 2>&1 | tee -a "$log.part" || failed=1
    mv "$log.part" "$log"
fi
timeout --kill-after 10 "$(awk "BEGIN {print int($minutes * 60 + 20)}")" \
    "$python" -m bench.sweep --minutes "$minutes" --json "$out/sweep.json" --continue "$@" || failed=1
exit "$failed"
