#!/bin/sh
# bench: one JSON line a point with all that a comparison needs, for every shape and routing, on tiny layers.
set -eu
. "$(dirname "$0")/cli_lib.sh"
small="--hidden 128 --intermediate 64 --repeat 2"

# shellcheck disable=SC2086 # a list of words
expect 0 bench --shape oss20b --experts 8 --tokens 1,3 --backend cpu --threads 2 --json $small
json shape=oss20b tokens backend=cpu activation_dtype=bf16 threads=2 kernel isa order routing=uniform ms_median ms_p10 ms_p90 \
    gbs gflops bandwidth_gbs_measured rate_gflops_measured rate_instruction rate_per_clock floor_ms ratio_to_floor \
    prepare_gbs check_worst_ratio commit version
[ "$(wc -l <"$out")" -eq 2 ] || die "not a line a point:"
says "$out" '"tokens":3,'

# The floor is that of the CPUs, however many threads take turns on them.  Rates of a busy machine differ by a factor of
# two, so that this can fail only where CPUs are few.
rate() {
    # shellcheck disable=SC2086
    expect 0 bench --experts 8 --tokens 1 --json "$@" $small
    sed -n 's/.*"rate_gflops_measured":\([0-9]*\).*/\1/p' "$out"
}
all=$(rate) many=$(rate --threads 200)
[ "$many" -lt "$((5 * all))" ] || die "200 threads multiply at $many GFLOP/s, as many as there are CPUs at $all:"

i=0
for shape in oss120b dsv3 v4flash k3; do
    i=$((i + 1))
    routing=$(echo zipf hot uniform zipf | cut -d ' ' -f $i)
    # shellcheck disable=SC2086
    expect 0 bench --shape $shape --experts 32 --tokens 2 --threads 1 --isa c --routing "$routing" --json $small
    json shape=$shape kernel=gemm_c isa=c threads=1 routing="$routing" n_experts=32
done

# shellcheck disable=SC2086
expect 0 bench --experts 8 --tokens 1 $small
says "$out" "ratio"
says "$out" "GB/s read"
expect 1 bench --shape k3 --experts 32767
says "$err" "32767 experts need"
expect 1 bench --experts 8 --hidden 1048576 --intermediate 32 --tokens 1048576
says "$err" "1048576 tokens need"

# Several shapes, and their picture: a line and a dashed floor a shape, a dot a point; it appears only when complete.
plot=$work/times.svg
# shellcheck disable=SC2086
expect 0 bench --shape dsv3,oss20b --experts 16 --tokens 4,1 --json --plot "$plot" $small
[ "$(wc -l <"$out")" -eq 4 ] || die "not a line a point:"
says "$out" '"shape":"dsv3","tokens":1,'
says "$out" '"shape":"oss20b","tokens":4,'
[ "$(grep -c '<polyline' "$plot")" -eq 4 ] && [ "$(grep -c 'stroke-dasharray' "$plot")" -eq 2 ] || die "not two lines a shape"
[ "$(grep -c '<circle' "$plot")" -eq 4 ] || die "not a dot a point"
says "$plot" "oss20b, 4 tokens: "
tail -1 "$plot" | grep -qx "</svg>" || die "the picture does not end"
xs=$(sed -n 's/.*<circle cx="\([0-9]*\).*/\1/p' "$plot" | head -2)
[ "$xs" = "$(echo "$xs" | sort -n)" ] || die "the points are not in the order of tokens: $xs"
if command -v xmllint >/dev/null; then xmllint --noout "$plot" || die "no XML"; fi
# shellcheck disable=SC2086
expect 0 bench --experts 8 --tokens 1 --plot "$plot" $small
grep -q 'stroke-dasharray="5 4" points="[0-9.]*,[0-9.]* [0-9]' "$plot" || die "the floor of one batch size is a point"
# shellcheck disable=SC2086
expect 1 bench --experts 8 --tokens 1 --plot "$work/none/times.svg" $small
[ ! -s "$out" ] || die "timed before the picture was tried:"
says "$err" "$work/none/times.svg: No such file or directory"
refuses 2 '--shape: "oss" is not one of oss20b, oss120b, v4flash, dsv3, k3' bench --shape dsv3,oss
