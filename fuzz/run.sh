#!/usr/bin/env bash
# run.sh BUILD SECONDS [TARGET...]: fuzzes each target for so many seconds at the lowest priority and prints what it did.
# New inputs go to BUILD/corpus/TARGET, findings to BUILD/findings/TARGET-*; fails if there are any.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$1 seconds=$2
targets=("${@:3}")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(basename -a "$here"/corpus/*)
findings=$build/findings
mkdir -p "$findings"

number() { # number LOG WORD: the last one that follows the word
    sed -n "s/.*$2 *\([0-9][0-9]*\).*/\1/p" "$1" | tail -n 1
}

fuzz() { # fuzz TARGET
    nice -n 19 "$build/fuzz/fuzz_$1" -max_total_time="$seconds" -print_final_stats=1 -print_funcs=0 -timeout=20 \
        -rss_limit_mb=1024 -max_len=6000 -dict="$here/$1.dict" -artifact_prefix="$findings/$1-" \
        "$build/corpus/$1" "$here/corpus/$1" >"$findings/$1.log" 2>&1 || echo "$1: a finding, see $findings/$1.log" >&2
}

printf '%-12s %12s %8s %9s %8s\n' target inputs edges features 'CPU s'
TIMEFORMAT='%U %S'
for target in "${targets[@]}"; do
    mkdir -p "$build/corpus/$target"
    { time fuzz "$target" 2>&3; } 3>&2 2>"$findings/time"
    printf '%-12s %12s %8s %9s %8.0f\n' "$target" "$(number "$findings/$target.log" stat::number_of_executed_units:)" \
        "$(number "$findings/$target.log" cov:)" "$(number "$findings/$target.log" ft:)" \
        "$(awk '{print $1 + $2}' "$findings/time")"
done
[ -z "$(find "$findings" -name '*-*' -print -quit)" ]
