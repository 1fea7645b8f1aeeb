#!/usr/bin/env bash
# Tunes a node's operating system for a benchmark run, as published MLPerf submissions do.
#
#   launch/tune_node.sh              says what is set and what it would set; changes nothing
#   sudo launch/tune_node.sh --apply     sets it, and saves the old values in STATE
#   sudo launch/tune_node.sh --restore   sets the saved values again
#
# STATE=/run/flux_ref_tuning is gone after a reboot, as the settings are. ROOT=/some/folder takes the files below that
# folder in place of the machine's. A setting that this machine lacks is said and left out.
set -euo pipefail

root=${ROOT:-}
state=${STATE:-$root/run/flux_ref_tuning}
mode=${1:-}

# files (a pattern), value, reason; one setting a line
settings() {
  cat <<'END'
/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor|performance|full clock at once: ranks wait for the slowest
/sys/devices/system/cpu/cpu[0-9]*/cpuidle/state[2-9]/disable|1|no deep C-states: waking from them delays every launch
/proc/sys/kernel/numa_balancing|0|no page faults to find out where memory is used
/proc/sys/kernel/nmi_watchdog|0|frees a performance counter and its interrupts
/proc/sys/kernel/randomize_va_space|0|the same address layout in every run: less spread
/sys/kernel/mm/transparent_hugepage/enabled|always|large pages for the buffers that data is read into
/sys/kernel/mm/transparent_hugepage/defrag|madvise|but no waiting for memory to be compacted
END
}

# The chosen one of "always [madvise] never", or all there is.
current() { sed -E 's/.*\[(.*)\].*/\1/' "$1"; }

# One line per setting: how many files have which value.
show() {
  local pattern value reason file
  while IFS='|' read -r pattern value reason; do
    for file in $root$pattern; do
      if [[ -e $file ]]; then current "$file"; fi
    done | sort | uniq -c | awk -v name="$pattern" -v value="$value" -v reason="$reason" '
      { count = $1; $1 = ""; found = found (found ? "," : "") " " count " x" $0 }
      END { printf "%s:%s -> %s  (%s)\n", name, found ? found : " not on this machine", value, reason }'
  done < <(settings)
  echo "/proc/sys/vm/drop_caches: 3 is written once  (the page cache starts empty)"
}

apply() {
  local pattern value file partial=$state.partial
  [[ ! -e $state ]] || { echo "tune_node.sh: $state exists: the node is tuned already; --restore first" >&2; exit 2; }
  mkdir -p "$(dirname "$state")"
  while IFS='|' read -r pattern value _; do
    for file in $root$pattern; do
      [[ -e $file ]] || continue
      [[ -w $file ]] || { echo "tune_node.sh: $file cannot be written; run as root" >&2; exit 2; }
      printf '%s|%s|%s\n' "$file" "$(current "$file")" "$value"
    done
  done < <(settings) >"$partial"
  mv "$partial" "$state" # saved before anything is changed
  while IFS='|' read -r file _ value; do write "$value" "$file"; done <"$state"
  sync
  write 3 "$root/proc/sys/vm/drop_caches"
}

restore() {
  [[ -e $state ]] || { echo "tune_node.sh: no $state: nothing was tuned here" >&2; exit 2; }
  while IFS='|' read -r file value _; do write "$value" "$file"; done <"$state"
  rm "$state"
}

# A value that the kernel refuses is said; the others are set all the same, and the exit code is 3.
code=0
write() { echo "$1" >"$2" || { echo "tune_node.sh: $2 does not take $1" >&2; code=3; }; }

case $mode in
  "") show ;;
  --apply) apply ;;
  --restore) restore ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
exit "$code"
