#!/bin/sh
# inspect --health: each fault is found and counted, a sound checkpoint has none; the picture.
set -eu
. "$(dirname "$0")/cli_lib.sh"
model=$work/model
file=$model/model.safetensors

# place NAME: offset of a tensor's data in the file.
place() {
    length=$(od -An -tu8 -N8 "$file" | tr -d ' ')
    begin=$(head -c $((8 + length)) "$file" | tail -c "$length" |
        sed "s/.*\"$1\":{[^}]*\"data_offsets\":\[\([0-9]*\),.*/\1/")
    echo $((8 + length + begin))
}

# patch OFFSET OCTAL_BYTES: overwrites bytes of the file.
patch() {
    printf "$2" | dd of="$file" bs=1 seek="$1" conv=notrunc 2>/dev/null
}

make_small --layers 2 --seed 5 "$model"
expect 0 inspect "$model"
says "$out" "not looked at; --health reads the weights"
expect 0 inspect "$model" --health
says "$out" "health       healthy"
says "$out" "router bias"
expect 0 inspect "$model" --health --json
json health.healthy=true health.nan_scales=0 health.duplicate_experts=0 health.zero_experts=0 health.odd_values=0

# The histogram of a layer's scales counts each block: 8 experts of 192 rows of 2 and 64 rows of 3 blocks.
grep -o '"scales":{[^}]*}' "$out" | sed 's/"scales":{//; s/}//' | while read -r scales; do
    sum=0
    for count in $(echo "$scales" | tr ',' '\n' | sed 's/.*://'); do sum=$((sum + count)); done
    [ $sum -eq $((8 * (192 * 2 + 64 * 3))) ] || exit 1
done || die "blocks that no scale counts:"
[ "$(grep -o '"scales":{' "$out" | wc -l)" -eq 2 ] || die "not a histogram a layer:"
json layers bytes expert_weight_bytes

# A NaN scale, in expert 0; a NaN in a bias.
patch "$(place model.layers.1.mlp.experts.gate_up_proj_scales)" '\377'
patch "$(place model.layers.0.mlp.experts.down_proj_bias)" '\377\177'
expect 0 inspect "$model" --health --json
json health.healthy=false health.nan_scales=1 health.odd_values=1 health.zero_experts=0
expect 0 inspect "$model" --health
says "$out" "UNHEALTHY: NaN scales 1, zero experts 0, duplicate experts 0, odd values 1"

# An expert of zeros (192*2 + 64*3 blocks), and expert 3 made equal to expert 2.
rm -r "$model"
make_small --layers 2 --seed 5 "$model"
for part in "gate_up_proj_blocks 6144" "gate_up_proj_scales 384" "down_proj_blocks 3072" "down_proj_scales 192"; do
    at=$(place "model.layers.0.mlp.experts.${part% *}")
    size=${part#* }
    dd if=/dev/zero of="$file" bs="$size" count=1 oflag=seek_bytes seek="$at" conv=notrunc 2>/dev/null
    dd if="$file" of="$file" bs="$size" count=1 iflag=skip_bytes oflag=seek_bytes skip=$((at + 2 * size)) \
        seek=$((at + 3 * size)) conv=notrunc 2>/dev/null
done
expect 0 inspect "$model" --health --json
json health.healthy=false health.nan_scales=0 health.zero_experts=1 health.duplicate_experts=1 \
    'health.duplicates=[[[0,2],[0,3]]]'
expect 0 inspect "$model" --health
says "$out" "layer 0 expert 3 is layer 0 expert 2"
says "$out" "1 expert of zeros only"

# Rows too wide for fp8: a block 15 binades below its neighbour (e4m3 holds 14), another 12 (more than its normals do).
# Scales of zeros do not count.
at=$(place model.layers.1.mlp.experts.gate_up_proj_scales)
patch "$at" '\160\177'
patch $((at + 2)) '\163\177'
expect 0 inspect "$model" --health --json
grep -q '"layer":1.*"wide_row_share":{"e4m3_normal":0.000976562.*,"e4m3":0.00048828.*,"e5m2_normal":0.0,"e5m2":0.0}' "$out" ||
    die "shares of wide rows:"

# Tiles of 64 rows that e5m2 does not hold: one of 28 binades, in another expert one with scales below 2^-87.
patch "$at" '\144\177'
patch $((at + 384)) '\047\177'
expect 0 inspect "$model" --health --json
grep -q '"layer":1.*"fp8_raw":{"tiles":32,"nan":0,"extreme":1,"wide":1,"experts":2}' "$out" || die "tiles of raw experts:"
expect 0 inspect "$model" --health
says "$out" "2 experts in plain fp32, for 2 of 32 tiles: 1 too wide, 1 of extreme scales, 0 NaN"

expect 0 inspect "$model" --plot "$work/scales.svg"
[ "$(grep -c '<title>layer 1, ' "$work/scales.svg")" -gt 3 ] || die "no bars in the picture"
tail -1 "$work/scales.svg" | grep -qx '</svg>' || die "the picture has no end"
expect 1 inspect "$model" --plot /dev/full
says "$err" "/dev/full: is there, and not a regular file"
expect 1 inspect "$model" --plot "$work/none/scales.svg"
says "$err" "$work/none/scales.svg"
[ ! -s "$out" ] || die "read before the picture was tried:"
