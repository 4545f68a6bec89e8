#!/bin/sh
# combine: what run --deferred leaves, added up, is what run gives, bit for bit; scale and addend by the oracle.
set -eu
. "$(dirname "$0")/cli_lib.sh"
model=$data/golden/gptoss_small
io=$model/io.safetensors
rows=$work/rows
in=$work/in
sum=$work/sum
whole=$work/whole

for routing in logits ids; do
    for form in bf16 f16 f32; do
        expect 0 run "$model" --input "$io" --routing $routing --output "$whole" --output-dtype $form --repeat 1
        expect 0 run "$model" --input "$io" --routing $routing --output "$rows" --deferred --repeat 1
        expect 0 combine --input "$rows" --output "$sum" --output-dtype $form --check --json
        json backend=cpu tokens=17 top_k=4 rows=68 columns=64 scale=1.0 addend=false output_dtype=$form ms ok=true
        match equal "$sum" output "$whole" output
    done
done

# A part of the experts leaves slots without rows.
expect 0 run "$model" --input "$io" --output "$whole" --experts 2:3 --output-size 32 --repeat 1
expect 0 run "$model" --input "$io" --output "$rows" --experts 2:3 --output-size 32 --deferred --repeat 1
expect 0 combine --input "$rows" --output "$sum" --check
says "$out" "every element is the oracle's"
match equal "$sum" output "$whole" output

# Scale and addend, weights in either type.
for form in BF16 F16 F32; do
    weights=$form
    [ $form != F16 ] || weights=F32
    "$helpers/input_of" "$rows" "$in" gemm2_rows row_map expert_weights=$weights addend=$form:32
    expect 0 combine --input "$in" --output "$sum" --check --scale 2.5 --output-dtype f32 --json
    json scale=2.5 addend=true ok=true
    ! "$helpers/tensors_match" frobenius=0.1 "$sum" output "$whole" output 2>/dev/null || die "scale and addend changed nothing"
    expect 0 combine --input "$in" --output "$sum" --check
done

# What does not fit.
"$helpers/input_of" "$rows" "$in" gemm2_rows shift=40 row_map expert_weights=F32
expect 1 combine --input "$in" --output "$work/none"
says "$err" "row_map"
[ ! -e "$work/none" ] || die "something was written"
"$helpers/input_of" "$rows" "$in" gemm2_rows row_map expert_weights=F16
expect 1 combine --input "$in" --output "$work/none"
says "$err" "dtype F16, expected F32 or BF16"
"$helpers/input_of" "$rows" "$in" gemm2_rows row_map expert_weights=F32 addend=F32:64
expect 1 combine --input "$in" --output "$work/none"
says "$err" "shape [17, 64], expected [17, 32]"
expect 1 combine --input "$io" --output "$work/none"
says "$err" "no tensor \"gemm2_rows\""
refuses 2 "--scale: 0 would leave nothing of the sum" combine --input a --output b --scale 0
refuses 2 "--input is missing (see moe4 combine --help)" combine --output b
