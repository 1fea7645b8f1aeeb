#!/usr/bin/env bash
# Tunes a node's operating system for a benchmark run: the settings of AMD's and Oracle's public MLPerf submissions.
#
#   sudo launch/tune_node.sh         a reboot undoes it
#
# A setting that this machine lacks or refuses is named, the others are set all the same, and the exit code is 3.
set -uo pipefail
cd "${ROOT:-/}" || exit 3 # ROOT: a folder in place of the machine

code=0
# set_to VALUE FILE ...
set_to() {
  local value=$1 file
  shift
  for file in "$@"; do
    if [[ -w $file ]] && echo "$value" 2>/dev/null >"$file"; then continue; fi
    echo "tune_node.sh: /$file does not take $value" >&2
    code=3
  done
}

sync
set_to 3 proc/sys/vm/drop_caches                         # the page cache starts empty
set_to 0 proc/sys/kernel/numa_balancing                  # no page faults to find out where memory is used
set_to 0 proc/sys/kernel/nmi_watchdog                    # frees a performance counter and its interrupts
set_to 0 proc/sys/kernel/randomize_va_space              # the same address layout in every run: less spread
set_to always sys/kernel/mm/transparent_hugepage/enabled # large pages for the buffers that data is read into
set_to always sys/kernel/mm/transparent_hugepage/defrag
set_to performance sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor # full clock at once: ranks wait for the slowest
set_to 1 sys/devices/system/cpu/cpu[0-9]*/cpuidle/state[2-9]/disable         # waking from deep C-states delays every launch
exit "$code"
