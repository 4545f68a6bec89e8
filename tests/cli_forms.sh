#!/bin/sh
# Every form in which run and check take tokens, routing and experts, and give results: each against the oracle stage by
# stage, each with the bits of another form that means the same, and what does not go together is refused.
set -eu
. "$(dirname "$0")/cli_lib.sh"
model=$data/golden/gptoss_small
io=$model/io.safetensors
in=$work/in
result=$work/result
plain=$work/plain

# input TENSOR...: an input file of these, see input_of.c.
input() {
    "$helpers/input_of" "$io" "$in" "$@" || die "input_of $*"
}

# runs OPTION...: the input at hand, within every bound on the library's kernels and on the oracle itself.
runs() {
    expect 0 run "$model" --input "$in" --stages --check --json --repeat 3 --output "$result.ref" --backend ref "$@"
    json check.ok=true
    expect 0 run "$model" --input "$in" --stages --check --json --repeat 3 --output "$result" "$@"
    json check.ok=true check.routing=0.0 check.intermediate check.gemm2 check.output=0.0 workspace_bytes
    for name in topk_ids topk_weights row_map expert_weights; do match equal "$result" $name "$result.ref" $name; done
    match rounded "$result" gemm2_rows "$result.ref" gemm2_rows
}

# differs WHAT RULE FILE NAME OTHER_FILE OTHER_NAME: two tensors do not match.
differs() {
    what=$1
    shift
    ! "$helpers/tensors_match" "$@" 2>"$err.match" || die "$what"
}

# Ids and weights: f32, bf16, packed.
input hidden_states=BF16 topk_ids topk_weights=F32
runs
match equal "$result" topk_weights "$io" topk_weights
match equal "$result" expert_weights "$io" topk_weights
input hidden_states=BF16 topk_ids topk_weights=BF16
runs
cp "$result" "$plain"
input hidden_states=BF16 topk_packed
runs
for name in output topk_ids topk_weights expert_weights; do match equal "$result" $name "$plain" $name; done
expect 0 check "$model" --input "$in" --json
json stage tokens=17 ok=true
says "$out" '"kernel":"gemm_c"'
input hidden_states=BF16 shift=-3 topk_packed # negative ids in the high half
runs
differs "ids that name no expert changed nothing" equal "$result" output "$plain" output
expect 0 run "$model" --input "$in" --repeat 1
says "$err" "ids are none of 0..7 and not -1: they add nothing"

# Hidden states and logits in every float; bf16 values are the same numbers in f32.
for form in F32 F16 BF16; do
    input hidden_states=$form router_logits=$form
    runs
    input hidden_states=$form
    runs --activation-dtype mxfp8
    runs --activation-dtype fp8
done
input hidden_states=F32 topk_ids topk_weights=BF16
runs
match equal "$result" output "$plain" output

# The output's type and width, and what it is added to: each of several calls starts from it.
input hidden_states=BF16 topk_ids topk_weights=BF16
for form in f32 f16; do
    runs --output-dtype $form
    json output_dtype=$form
    match frobenius=4e-3 "$result" output "$plain" output
done
runs --output-size 40
expect 0 run "$model" --input "$in" --output "$result" --output-size 64
match equal "$result" output "$plain" output
for form in BF16 F16 F32; do
    input hidden_states=BF16 topk_ids topk_weights=BF16 addend=$form
    type=$(echo $form | tr A-Z a-z)
    runs --output-dtype "$type"
    match frobenius=4e-3 "$result" output "$result.ref" output
    differs "the addend changed nothing" frobenius=4e-2 "$result" output "$plain" output
    expect 0 check "$model" --input "$in" --output-dtype "$type"
done
input hidden_states=BF16 topk_ids topk_weights=BF16 addend=BF16:40
runs --output-size 40

# The weight on the input, with one expert a token.
for form in topk_weights=F32 topk_weights=BF16; do
    input hidden_states=BF16 top=1 topk_ids $form
    runs
    cp "$result" "$plain.one"
    runs --weight-on input
    differs "the weight is not on the input" frobenius=4e-3 "$result" gemm2_rows "$plain.one" gemm2_rows
    runs --weight-on input --activation-dtype mxfp8
    runs --weight-on input --activation-dtype fp8
    expect 0 check "$model" --input "$in" --weight-on input
done

# Experts by a map: any order, or some of them.
input hidden_states=BF16 topk_ids topk_weights=BF16 expert_map=7,6,5,4,3,2,1,0
runs
match equal "$result" output "$plain" output
input hidden_states=BF16 topk_ids topk_weights=BF16
runs --experts 3:5
cp "$result" "$plain.part"
input hidden_states=BF16 topk_ids topk_weights=BF16 expert_map=-1,-1,-1,0,1,2,3,4
runs
for name in output row_map gemm2_rows; do match equal "$result" $name "$plain.part" $name; done
expect 0 check "$model" --input "$in"
expect 0 run "$model" --input "$in" --prepared "$work/layer" --output "$result"
says "$err" "written, for the next time"
expect 0 run "$model" --input "$in" --prepared "$work/layer" --output "$result"
[ ! -s "$err" ] || die "the prepared layer was not used"
match equal "$result" output "$plain.part" output
input hidden_states=BF16 topk_ids topk_weights=BF16 expert_map=-1,-1,-1,1,0,2,3,4
expect 0 run "$model" --input "$in" --prepared "$work/layer" --output "$result"
says "$err" "source is "
match equal "$result" output "$plain.part" output

# refused STATUS TEXT OPTION...: the input at hand, with a reason.
refused() {
    wanted_status=$1
    text=$2
    shift 2
    expect "$wanted_status" run "$model" --input "$in" "$@"
    says "$err" "$text"
}
refused 1 "both --experts and an expert_map" --experts 0:3
input hidden_states=BF16 topk_ids topk_weights=F32 expert_map=0,1,1,2,3,4,5,6
refused 1 "local expert 1 for both 1 and 2"
input hidden_states=BF16 topk_ids topk_weights=F32 expert_map=0,1,-1,-1,-1,-1,-1,4
refused 1 "up to 4, but not 2"
input hidden_states=BF16 topk_ids topk_weights=F32 expert_map=0,1,2,3,4,5,6,8
refused 1 "expert_map[7] is 8, expected -1 to 7"
input hidden_states=BF16 topk_ids topk_weights=F32 expert_map=-1,-1,-1,-1,-1,-1,-1,-1
refused 1 "names no local expert"
input hidden_states=BF16 topk_ids topk_weights=F32 expert_map=0,1
refused 1 "shape [2], expected [8]"
input hidden_states=BF16 topk_ids topk_packed
refused 1 "both \"topk_packed\" and \"topk_ids\""
input hidden_states=BF16 topk_packed topk_weights=F32
refused 1 "both \"topk_packed\" and \"topk_weights\""
input hidden_states=BF16 topk_ids
refused 1 "no tensor \"topk_weights\""
input hidden_states=BF16 topk_ids topk_weights=F16
refused 1 "dtype F16, expected F32 or BF16"
refused 1 "F16, expected" --routing ids
input hidden_states=BF16 topk_ids topk_weights=F32
refused 1 "top_k is 4" --weight-on input
refused 1 "output_size" --output-size 65
input hidden_states=BF16 topk_ids topk_weights=F32 addend=F32
refused 1 "dtype F32, expected BF16"
refused 1 "shape [17, 64], expected [17, 32]" --output-dtype f32 --output-size 32
refused 2 "--deferred leaves out the output" --output-dtype f32 --deferred
input hidden_states=BF16 topk_ids topk_weights=F32 addend=BF16
refused 2 "the input's addend" --deferred
input hidden_states=BF16 router_logits=F32 topk_packed
expect 0 run "$model" --input "$in" --repeat 1
says "$err" "not used: topk_packed"
expect 0 run "$model" --input "$in" --repeat 1 --routing ids
says "$err" "not used: router_logits"
refused 2 "routed by router_logits" --weight-on input
refused 2 "routed by the layer's own router" --weight-on input --routing router
refuses 2 "--weight-on is for ids and weights, which only --input brings" run "$model" --weight-on input
refuses 2 "--tokens generates batches, but --input brings one" check "$model" --input "$in" --tokens 3
refuses 2 "--routing chooses among the tensors of --input" check "$model" --routing ids
