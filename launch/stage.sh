#!/usr/bin/env bash
# Copies a data set from shared storage to each node's own disk, before a run.
#
#   launch/stage.sh SRC DST          in a Slurm job: on all nodes of the job; elsewhere: on this machine
#
# In a job of several nodes the first one reads a file once, and sbcast passes it on from node to node. Then rsync copies
# what a node still lacks, by size and time. If SRC holds manifest.sha256 (of sha256sum), each node checks all its files.
# The copy is DST.partial until it is whole, also while the same command looks through an older copy. After a stop the
# same command goes on. Exit codes: 0 done, 2 refused, others: of the program that failed.
set -euo pipefail

die() {
  echo "stage.sh: $*" >&2
  exit 2
}

[[ $# == 2 && -d $1 ]] || die "give SRC, a folder on shared storage, and DST, a folder on the nodes' own disks"
src=$(realpath "$1") dst=$(realpath -m "$2")
[[ $src/ != "$dst"/* && $dst/ != "$src"/* ]] || die "$src and $dst lie inside each other; choose another DST"
command -v rsync >/dev/null || die "rsync is missing; install it on all nodes"

nodes=${SLURM_JOB_NUM_NODES:-1}
everywhere=()
[[ -z ${SLURM_JOB_ID:-} ]] || everywhere=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1)

# What each node does before and after the files are sent. $1: SRC, $2: DST.
# shellcheck disable=SC2016 # variables of the node
begin='set -euo pipefail
for old in "$2" "$2.partial"; do
  [[ -d $old ]] || continue
  more=$(rsync -rn --delete --existing --ignore-existing --itemize-changes "$1/" "$old/" | sed -n "s/^\*deleting *//p" | head -n 1)
  [[ -z $more ]] || { echo "stage.sh: $(hostname): $old/$more is not in $1; remove it or choose another DST" >&2; exit 2; }
done
[[ ! -d $2 ]] || mv -T "$2" "$2.partial"
mkdir -p "$2.partial"
rsync -r --include="*/" --exclude="*" "$1/" "$2.partial/"'
# shellcheck disable=SC2016
finish='set -euo pipefail
rsync -rtL "$1/" "$2.partial/"
cd "$2.partial"
[[ ! -e manifest.sha256 ]] || sha256sum --check --quiet manifest.sha256
sync -f .
mv -T "$2.partial" "$2"'

"${everywhere[@]}" bash -c "$begin" - "$src" "$dst"
if ((nodes > 1)); then
  rsync -rtLn --out-format=%n "$src/" "$dst.partial/" | { grep -v '/$' || true; } |
    xargs -r -d '\n' -P 8 -I{} sbcast --force --preserve "$src/{}" "$dst.partial/{}"
fi
"${everywhere[@]}" bash -c "$finish" - "$src" "$dst"
echo "stage.sh: $dst is whole on $nodes node(s)"
