#!/bin/sh
# run and check on a small checkpoint: every option, and that all ways to the same result agree.
set -eu
. "$(dirname "$0")/cli_lib.sh"
model=$work/model
full=$work/full
part=$work/part
make_small --layers 2 "$model"

expect 0 run "$model" --tokens 9 --seed 3 --check --json --output "$full" --stages --replay --repeat 2
json model="$model" layer=0 backend=cpu kernels isa order threads tokens=9 hidden_size=64 intermediate_size=96 n_experts=8 \
    top_k=4 activation_dtype=bf16 ms repeat=2 tokens_per_s gbs bandwidth_gbs_measured expert_load check.router \
    check.routing=0.0 check.intermediate check.gemm2 check.output=0.0 check.frobenius check.ok=true
match equal "$full" routed_ids "$full" topk_ids
match equal "$full" expert_weights "$full" topk_weights

expect 0 run "$model" --tokens 9 --seed 3 --check --threads 1
for text in "layer 0 (gpt-oss)" "9, generated, routed by the layer's own router" "tokens/s" "memory reads at" \
    "expert load" "the median of" "check        ok"; do
    says "$out" "$text"
done

# The same tokens from a file, routed by their logits, by their ids, and by the router again.
expect 0 synth --hidden 64 --intermediate 96 --experts 8 --layers 2 "$model"
for routing in logits ids router; do
    expect 0 run "$data/golden/gptoss_small" --input "$data/golden/gptoss_small/io.safetensors" --routing $routing \
        --output "$work/by_$routing" --repeat 1
    says "$err" "not used: output"
done
match frobenius=4e-3 "$work/by_ids" output "$work/by_logits" output # ids bring weights in f32
match frobenius=2e-3 "$work/by_router" output "$work/by_logits" output

# Deferred: rows and a map instead of their sum.
expect 0 run "$model" --tokens 9 --seed 3 --deferred --output "$part" --repeat 1
for name in gemm2_rows row_map expert_weights; do match equal "$part" $name "$full" $name; done
! grep -aq '"output"' "$part" || die "a deferred result has an output"

# A part of the experts: rows are in the order of experts, so that parts are the beginning and the end of the whole.
expect 0 run "$model" --tokens 9 --seed 3 --experts 0:3 --check --json --deferred --output "$part" --repeat 1
json n_experts=8 check.ok=true
match begins "$part" gemm2_rows "$full" gemm2_rows
expect 0 run "$model" --tokens 9 --seed 3 --experts 3:5 --deferred --output "$part" --repeat 1
match ends "$part" gemm2_rows "$full" gemm2_rows

# The oracle as a backend, another layer, other kernels.
expect 0 run "$model" --tokens 9 --seed 3 --backend ref --output "$part" --json
json backend=ref 'kernels=["oracle"]'
match equal "$part" topk_ids "$full" topk_ids
match rounded "$part" output "$full" output
expect 0 run "$model" --layer 1 --tokens 9 --seed 3 --output "$part" --repeat 1
! cmp -s "$part" "$full" || die "layer 1 is layer 0"
expect 0 run "$model" --isa c --tokens 9 --check --json --repeat 1
json isa=c check.ok=true

# MXFP8, fp8 and int8 activations.
for dtype in mxfp8 fp8 int8; do
    expect 0 run "$model" --activation-dtype $dtype --tokens 9 --check --json --stages --output "$part" --repeat 1
    json activation_dtype=$dtype check.ok=true
    grep -aq '"intermediate_scale"' "$part" || die "no scales of the intermediate"
    expect 0 run "$model" --activation-dtype $dtype --tokens 9 --backend ref --stages --output "$work/oracle"
    match frobenius=1e-3 "$part" output "$work/oracle" output
done

# A tuning and a prepared layer change nothing; each is made once, and refused where it does not belong.
expect 0 tune "$model" --output "$work/tuning.json" --max-tokens 12 --ms 1 --json
json tokens ms default_ms tile_tokens claim_share
expect 0 run "$model" --tokens 9 --seed 3 --tuning "$work/tuning.json" --prepared "$work/layer" --output "$part"
says "$err" "written, for the next time"
match equal "$part" output "$full" output
expect 0 run "$model" --tokens 9 --seed 3 --prepared "$work/layer" --output "$part"
[ ! -s "$err" ] || die "the prepared layer was not used"
match equal "$part" output "$full" output
expect 0 run "$model" --layer 1 --tokens 9 --prepared "$work/layer"
says "$err" "source is "
expect 1 run "$model" --isa c --tuning "$work/tuning.json"
says "$err" "isa is "
expect 0 bench --experts 4 --hidden 64 --intermediate 64 --tokens 1 --repeat 1 --tuning "$work/tuning.json"

# Inputs that do not fit.
expect 1 run "$model" --input "$full"
says "$err" "no tensor \"hidden_states\""
expect 1 run "$data/golden/gptoss_clamped" --input "$data/golden/gptoss_small/io.safetensors"
says "$err" "shape [17, 64], expected [any, 96]"
expect 2 run "$data/golden/gptoss_small" --input "$data/golden/gptoss_small/io.safetensors" --routing ids --replay
expect 1 run "$model" --output "$work/none/file" --tokens 1
says "$err" "$work/none/file"

# check: every kernel of the machine, stage by stage.
expect 0 check "$model" --json --tokens 1,9
json stage kernel isa order tokens ok=true
for stage in router routing intermediate gemm2 output layer; do says "$out" "\"stage\":\"$stage\""; done
says "$out" '"kernel":"gemm_c"'
for dtype in mxfp8 fp8; do
    expect 0 check "$model" --tokens 3 --activation-dtype $dtype
    says "$out" gemm_c
done
