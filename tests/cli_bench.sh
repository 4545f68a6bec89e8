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
