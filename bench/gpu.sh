#!/usr/bin/env bash
# What a machine with an accelerator is asked, in less than ten minutes per call: the tests of a device, and figures.
#   bench/gpu.sh [NAME ...]   the variants named, or all; call it again until it prints no "not run"
#   bench/gpu.sh --small      the micro model, and a CPU that stands in for a device: tries this script, measures nothing
# A variant writes NAME.json and NAME.log into $OUT, by default a folder for the commit. What has its NAME.json does not
# run again. What failed, in this call or an earlier one, runs once more after all that is new: if it ran out of time
# while it compiled, it now finds the compiled code.
set -uo pipefail
cd "$(dirname "$0")/.."
small=
[ "${1:-}" != --small ] || { small=yes; shift; }
wanted=" $* "
out=${OUT:-bench/results/gpu_$(git describe --always --dirty 2>/dev/null || echo unknown)}
mkdir -p "$out" || exit 2
# Variants share compiled code, which is in a folder of this user.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HOME/.cache/flux_ref_gpu}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} out small python=${PYTHON:-python3}
limit=570 most=240 least=120 # seconds: of a call, of a variant, and without which no variant begins, as many compile

run() { # NAME COMMAND...
  local name=$1 left=$((limit - SECONDS))
  if [ "$wanted" != "  " ] && [[ $wanted != *" $name "* ]] || [ -e "$out/$name.json" ]; then return; fi
  if [ $pass = new ] && [ -e "$out/$name.log" ]; then return; fi
  [ $left -ge $least ] || { echo "$name: not run"; return; }
  timeout --signal INT --kill-after 10 $((left < most ? left : most)) "${@:2}" >"$out/$name.log" 2>&1
  echo "$name: exit code $?, at $SECONDS s; $(tail -n 1 "$out/$name.log")"
}

bench() { # NAME MODULE OPTION...
  run "$1" "$python" -m "bench.$2" "${@:3}" --json="$out/$1.json"
}

part() { # NAME ROWS OPTION...: a step with FSDP2 on one rank, of some blocks of full width
  bench "$1" step "${config[@]}" "${cut[@]}" "${times[@]}" --synthetic --compute.activation_memory_budget=1.0 \
    --train.global_batch="$2" --train.micro_batch="$2" --compute.cuda_graphs=off --compute.compile=true "${@:3}"
}

diffusers=$("$python" -c "import importlib.util as u; print(u.find_spec('diffusers') or '')")
[ "$diffusers" ] || echo "race_*: left out, as the package diffusers is not here"
peer() { # NAME OPTION...
  [ "$diffusers" ] || return
  bench "$1" race "${config[@]}" --model.double_blocks=1 --model.single_blocks=1 "${times[@]}" \
    --train.global_batch="$rows" --train.micro_batch="$rows" --compute.activation_memory_budget=1.0 "${@:2}"
}

tests() { # NAME FILE...: in processes one after another, until every test has an outcome
  local code=1
  until [[ $code =~ ^[02345]$ ]]; do # else a test failed, took too long or crashed
    "$python" -m pytest -m gpu -p bench.device_tests -p no:faulthandler -x ${small:+--stand-in} \
      --outcomes "$out/$1.jsonl" "${@:2}"
    code=$?
  done
  [[ $code =~ ^[05]$ ]] && cp "$out/$1.jsonl" "$out/$1.json"
}
export -f tests

marked=$(grep -rlE '^(@pytest\.mark\.gpu|pytestmark.*mark\.gpu)' tests --include='test_*.py')
mapfile -t graphs < <(grep graph <<<"$marked")
mapfile -t others < <(grep -v graph <<<"$marked")
config=(--config configs/schnell_gbs512.toml) cut=(--model.double_blocks=4 --model.single_blocks=8)
times=(--steps=10 --warmup=3) ranks=8 rows=32 larger="4 8 16 64" layouts="16_0.5 16_0.9 8_1.0" flash=flash
if [ $small ]; then config=(--config tests/micro.toml) cut=() times=(--steps=2 --warmup=1) ranks=4 rows=4 larger=2 layouts=2_0.5 flash=auto; fi
captured=--compute.cuda_graphs=on
delayed=(--precision.preset=fp8_delayed --precision.dynamic_steps=0)

for pass in new again; do # what decides most comes first
  run tests_graphs bash -c 'tests tests_graphs "$@"' _ "${graphs[@]}"
  # The whole net at the config's layout, as one rank of 8: its capture with accumulation, its memory, FSDP2's copies.
  bench fake_ranks step "${config[@]}" "${times[@]}" --fake-ranks=$ranks
  bench ceiling ceiling "${config[@]}" --micro-batches 8 16
  part eager $rows --compute.compile=false
  part compiled $rows --profile="$out/compiled_trace.json"
  part graph $rows $captured
  part graph_fp8_delayed $rows $captured "${delayed[@]}"
  part fp8_delayed $rows "${delayed[@]}" --profile="$out/fp8_delayed_trace.json"
  run tests_others bash -c 'tests tests_others "$@"' _ "${others[@]}"
  peer race_compiled --compute.compile=true
  part fp8 $rows --precision.preset=fp8
  part flash $rows --compute.attention=$flash
  part regions_of_2 $rows --parallel.region_blocks=2
  part regions_of_4 $rows --parallel.region_blocks=4
  # The layouts that `tools.plan --layouts` finds best for 8 H100: micro-batch and budget.
  for layout in $layouts; do
    own=("${layout%_*}" --compute.activation_memory_budget="${layout#*_}" $captured)
    part "layout_$layout" "${own[@]}"
    part "layout_fp8_delayed_$layout" "${own[@]}" "${delayed[@]}"
  done
  peer race_eager --compute.compile=false
  for count in $larger; do part "batch_$count" "$count"; done
done
