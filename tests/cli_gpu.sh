#!/bin/sh
# --backend cuda: where there is a GPU (and a build for it), every verb uses it and what it says is checked; elsewhere every
# verb refuses with a reason.
set -eu
. "$(dirname "$0")/cli_lib.sh"
model=$data/golden/gptoss_small
io=$model/io.safetensors
in=$work/in
result=$work/result
small="--experts 8 --hidden 256 --intermediate 128 --tokens 1,40 --repeat 3"

refuses 2 "--threads are the CPU's, but --backend is cuda" run "$model" --backend cuda --threads 2
refuses 2 "--isa c is the CPU's, but --backend is cuda" bench --backend cuda --isa c
refuses 2 "--isa sm_80 is a GPU's, but --backend is cpu" bench --isa sm_80
refuses 2 "--threads are the CPU's, but --backend is cuda" check "$model" --backend cuda --threads 2
refuses 2 '--backend: "gpu" is not one of all, cpu, cuda' check "$model" --backend gpu

if ! "$command" inspect "$model" --backend cuda >/dev/null 2>&1; then
    # shellcheck disable=SC2086 # a list of words
    for verb in "inspect $model" "run $model" "check $model" "bench $small" "tune $model --output $work/none" \
        "combine --input $work/none --output $work/none"; do
        # shellcheck disable=SC2086
        expect 1 $verb --backend cuda
        grep -q "device is cuda, but " "$err" || die "no reason why there is no GPU:"
        [ ! -s "$out" ] || [ "${verb%% *}" = check ] || die "results without a GPU:"
    done
    [ ! -e "$work/none" ] || die "a tuning without a GPU"
    expect 0 check "$model" --tokens 1 --json # all that is there
    ! grep -q sm_ "$out" || die "a kernel of a GPU that is not there:"
    echo "no GPU: only refusals were tested" >&2
    exit 0
fi

expect 0 inspect "$model" --backend cuda --json
json machine.backend=cuda machine.name machine.multiprocessors machine.memory_bytes
says "$out" '"runs":{"bf16":"ok",'

# Every form of cli_forms.sh that differs for where the memory is.
runs() {
    expect 0 run "$model" --input "$in" --output "$result.cpu" --stages --repeat 1 "$@"
    expect 0 run "$model" --input "$in" --output "$result" --stages --check --json --repeat 3 --backend cuda "$@"
    json backend=cuda gpu check.ok=true check.routing=0.0 check.intermediate check.gemm2 check.output=0.0 ms \
        bandwidth_gbs_measured workspace_bytes
    for name in topk_ids topk_weights row_map expert_weights; do match equal "$result" $name "$result.cpu" $name; done
    match frobenius=4e-3 "$result" output "$result.cpu" output
}
for form in "router_logits=F32" "router_logits=BF16" "topk_ids topk_weights=F32" "topk_packed" "" \
    "topk_packed expert_map=-1,-1,-1,1,0,2,3,4" "topk_ids topk_weights=BF16 addend=BF16"; do
    # shellcheck disable=SC2086
    "$helpers/input_of" "$io" "$in" hidden_states=BF16 $form
    runs
done
"$helpers/input_of" "$io" "$in" hidden_states=F32 router_logits=F16 addend=F32
runs --output-dtype f32
"$helpers/input_of" "$io" "$in" hidden_states=BF16 top=1 topk_ids topk_weights=F32
runs --weight-on input --output-size 40 --output-dtype f16
"$helpers/input_of" "$io" "$in" hidden_states=BF16 router_logits=F32
runs --activation-dtype mxfp8
runs --activation-dtype fp8
expect 0 run "$model" --tokens 9 --backend cuda --deferred --replay --output "$result"
match equal "$result" routed_ids "$result" topk_ids
expect 0 run "$model" --tokens 9 --output "$result.cpu"
expect 0 combine --input "$result" --output "$result.sum" --backend cuda --check --scale 2 --output-dtype f32
expect 0 combine --input "$result" --output "$result.sum" --backend cuda --check
match frobenius=4e-3 "$result.sum" output "$result.cpu" output
expect 0 check "$model" --backend cuda --json --tokens 1,33
json stage isa ok=true
expect 0 check "$model" --tokens 1 --json
says "$out" '"isa":"c"'
says "$out" '"isa":"sm_'
# shellcheck disable=SC2086
expect 0 bench --backend cuda --shape oss20b,v4flash --json --plot "$work/times.svg" $small
json backend=cuda gpu tflops copy_gbs_measured bf16_tflops_measured clock_ghz ratio_to_floor check_worst_ratio layers
[ "$(wc -l <"$out")" -eq 4 ] || die "not a line a point:"
says "$work/times.svg" "</svg>"
# shellcheck disable=SC2086
expect 0 bench --backend cuda $small
says "$out" "copied (read and written)"
expect 0 tune "$model" --backend cuda --max-tokens 40 --ms 1 --json --output "$work/tuning"
json tokens tile_tokens claim_share=0 ms default_ms
says "$work/tuning" '"isa": "sm_'
expect 0 run "$model" --tokens 30 --backend cuda --tuning "$work/tuning" --check
expect 1 run "$model" --tokens 30 --tuning "$work/tuning"
says "$err" "device is \""
