#!/bin/sh
# The golden layers through the command, on the oracle and on every instruction set of this machine, against programs that
# nobody on this project wrote.
set -eu
. "$(dirname "$0")/cli_lib.sh"
result=$work/result

expect 0 check "$data/golden/gptoss_small" --tokens 1 --json
levels=$(sed -n 's/.*"isa":"\([^"]*\)".*/\1/p' "$out" | sort -u)
[ -n "$levels" ] || die "no instruction sets"

for name in gptoss_small gptoss_clamped gptoss_one_token; do
    layer=$data/golden/$name
    for level in $levels ref; do
        if [ "$level" = ref ]; then set -- --backend ref; else set -- --isa "$level"; fi
        expect 0 run "$layer" --input "$layer/io.safetensors" --stages --check --repeat 1 --output "$result" "$@"
        match equal "$result" topk_ids "$layer/io.safetensors" topk_ids
        match frobenius=4e-3 "$result" topk_weights "$layer/io.safetensors" topk_weights
        match frobenius=4e-3 "$result" output "$layer/io.safetensors" output
        match equal "$result" row_map "$layer/io_rounded.safetensors" row_map
        for stage in expert_weights intermediate gemm2_rows output; do
            match rounded "$result" $stage "$layer/io_rounded.safetensors" $stage
        done
    done
done

# Routing alone.
groups=$data/golden/dsv3_256_8/io.safetensors
expect 0 route --method deepseek_v3 --top-k 8 --n-group 8 --topk-group 4 --scale 2.5 --input "$groups" --output "$result" --json
json method=deepseek_v3 tokens=64 n_experts=256 top_k=8 expert_load
match rows=0 "$result" topk_ids "$groups" topk_ids
match rows=4e-3 "$result" topk_weights "$groups" topk_weights
expect 0 route --method renormalize --top-k 4 --input "$data/golden/gptoss_small/io.safetensors" --output "$result"
match equal "$result" topk_ids "$data/golden/gptoss_small/io.safetensors" topk_ids

expect 1 route --method deepseek_v3 --top-k 8 --n-group 7 --topk-group 4 --input "$groups" --output "$result"
says "$err" "n_group"
expect 1 route --method hash --top-k 8 --input "$groups" --output "$result"
says "$err" "token_ids"
