#!/bin/sh
# quantize: unquantised checkpoints give back the codes they came from, in every layout; what is refused; what a second
# run keeps.
set -eu
. "$(dirname "$0")/cli_lib.sh"
model=$work/model

make_small --layers 2 --seed 3 "$model"

# same FILE OTHER: every tensor of both files is the same.
same() {
    "$helpers/same_tensors" "$1" "$2" >"$out" 2>"$err" || die "$1 and $2 differ:"
}

# unquantised FOLDER: gives it the model's config.json without a quantisation.
unquantised() {
    sed 's/"quantization_config"/"nothing"/' "$model/config.json" >"$1/config.json"
}

# A synthetic checkpoint unquantised and quantised again by its rule is itself, from every type.
for dtype in BF16 F16 F32; do
    dense=$work/dense_$dtype
    mkdir "$dense"
    "$helpers/dense_of" "$model" "$dense" stacked $dtype
    unquantised "$dense"
    expect 0 quantize "$dense" "$work/q_$dtype" --to gpt-oss --check --json
    json layout=gpt-oss rule=even shards=1 total.relative_error=0.0 total.saturated_share=0.0 total.nan_blocks=0 tensors
    same "$model/model.safetensors" "$work/q_$dtype/model.safetensors"
done

# mse is never worse than the others; all are close on weights off the grid; each is what the oracle says.
mkdir "$work/apart"
"$helpers/dense_of" "$model" "$work/apart" apart BF16
cat >"$work/apart/config.json" <<'END'
{"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2,
 "num_hidden_layers": 2, "hidden_act": "silu", "norm_topk_prob": true}
END
for rule in floor even ceil mse; do
    expect 0 quantize "$work/apart" "$work/apart_$rule" --to compressed-tensors --rule $rule --check --json
    json rule=$rule layout=compressed-tensors
    expect 0 inspect "$work/apart_$rule" --json
    json n_moe_layers=2
    expect 0 run "$work/apart_$rule" --tokens 5 --check --json
    json check.ok=true
done

# Experts that are apart are stacked where the layout has them so, and the other way round: gpt-oss's, one tensor each.
mkdir "$work/oss_apart"
"$helpers/dense_of" "$model" "$work/oss_apart" apart_with_biases BF16
unquantised "$work/oss_apart"
expect 0 quantize "$work/oss_apart" "$work/q_stacked" --to gpt-oss --check
same "$model/model.safetensors" "$work/q_stacked/model.safetensors"

# A config that says of its text part what the experts are: the layout's word goes where the old one was.
mkdir "$work/nested"
cp "$work/apart/model.safetensors" "$work/nested"
cat >"$work/nested/config.json" <<'END'
{"model_type": "deepseek_v41", "text_config": {"hidden_size": 64, "moe_intermediate_size": 96, "n_routed_experts": 8,
 "num_experts_per_tok": 2, "num_hidden_layers": 2, "swiglu_limit": 10.0, "norm_topk_prob": true,
 "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "expert_dtype": "bf16"}}
END
expect 0 quantize "$work/nested" "$work/q_nested" --to deepseek-v4
expect 0 inspect "$work/q_nested" --json
json family=DeepSeek-V4.1 "layout=DeepSeek-V4 released" n_moe_layers=2

# Every layout: the layer that is read back computes what that of compressed-tensors does.
run_layer() { # run_layer PATH OUTPUT
    expect 0 run "$1" --layer 1 --tokens 5 --output "$2"
}
for source in apart oss_apart dense_BF16; do
    rm -rf "$work/q_ct"
    expect 0 quantize "$work/$source" "$work/q_ct" --to compressed-tensors
    run_layer "$work/q_ct" "$work/ct.safetensors"
    for to in quark modelopt mlx gguf gguf-fused; do
        made=$work/q_$source-$to
        case $to in gguf*) made=$made.gguf ;; esac
        expect 0 quantize "$work/$source" "$made" --to $to --check --json
        json layout=$to rule=even total.nan_blocks=0
        run_layer "$made" "$work/other.safetensors"
        same "$work/ct.safetensors" "$work/other.safetensors"
    done
done
expect 0 quantize "$work/dense_F32" "$work/parts.gguf" --to gguf --shard-bytes 1 --rule floor
run_layer "$work/parts-00001-of-00002.gguf" "$work/other.safetensors"

# What is not quantised is told apart, not run; without its quantisation config an MXFP4 checkpoint is no such thing.
expect 0 inspect "$work/apart" --json
json layout=unquantised n_moe_layers=0 n_other_layers=2
expect 0 inspect "$work/dense_F16" --json
json "layout=unquantised, stacked" n_moe_layers=0 n_other_layers=2
expect 1 run "$work/apart"
says "$err" "moe4 quantize"
cp -r "$model" "$work/silent"
sed 's/quantization_config/other_config/' "$model/config.json" >"$work/silent/config.json"
expect 1 inspect "$work/silent"
says "$err" "quantization_config.quant_method is missing"

# A tensor that is missing, or another shape than the others'.
mkdir "$work/E"
cp "$work/apart/model.safetensors" "$work/E"
sed 's/"moe_intermediate_size": 96/"moe_intermediate_size": 64/' "$work/apart/config.json" >"$work/E/config.json"
expect 1 quantize "$work/E" "$work/x" --to mlx
says "$err" "gate_proj.weight: shape [96, 64], expected [64, 64]"
sed 's/"num_experts": 8/"num_experts": 9/' "$work/apart/config.json" >"$work/E/config.json"
for to in gguf mlx; do
    expect 1 quantize "$work/E" "$work/x.gguf" --to $to
    says "$err" "layer 0: 8 experts, but config.json says 9"
done
rm "$work/E/config.json" && mkfifo "$work/E/config.json"
expect 1 quantize "$work/E" "$work/x" --to mlx
says "$err" "config.json: not a regular file"

# Names that are not what they seem, all as long as the true ones: a layer for multi-token prediction is none of the
# model's; two tensors for one place, and an expert with a number that 32 bits do not hold.
renamed() { # renamed FOLDER SED_SCRIPT
    mkdir "$1"
    LC_ALL=C sed "$2" "$work/apart/model.safetensors" >"$1/model.safetensors"
    sed 's/"num_hidden_layers": 2/"num_hidden_layers": 1/' "$work/apart/config.json" >"$1/config.json"
}
renamed "$work/extra" 's/layers\.1\./mtp.0000./g'
expect 0 quantize "$work/extra" "$work/q_extra" --to compressed-tensors --json
json total.blocks=9216
renamed "$work/clash" 's/model\.layers\.1\./other.layers.0./g'
expect 1 quantize "$work/clash" "$work/x" --to compressed-tensors
says "$err" "both the same weights of layer 0"
renamed "$work/wrapped" 's/model\.layers\.1\.mlp\.experts\.7\./xlayers.1.experts.4294967295./g'
expect 1 quantize "$work/wrapped" "$work/x" --to compressed-tensors
says "$err" "experts.4294967295."
says "$err" "an expert's number, expected 0 to 32767"
renamed "$work/beside" 's/model\.layers\.1\.mlp/mtp.layers.0000.mm/g'
expect 0 quantize "$work/beside" "$work/q_beside" --to compressed-tensors --json
json total.blocks=4608

# The largest float becomes 1.5 * 2^127, a quarter less.  (Behind it only a router of 1024 bytes.)
mkdir "$work/largest"
"$helpers/dense_of" "$model" "$work/largest" apart F32
cp "$work/apart/config.json" "$work/largest"
file=$work/largest/model.safetensors
printf '\377\377\177\177' | dd of="$file" bs=1 seek=$(($(wc -c <"$file") - 1028)) conv=notrunc 2>"$err"
expect 0 quantize "$work/largest" "$work/q_largest" --to compressed-tensors --check --json
json total.relative_error=0.25 total.nan_blocks=0

# Neither bytes nor the report depend on the number of threads.
if command -v taskset >"$out"; then
    expect 0 quantize "$work/apart" "$work/many" --to modelopt --rule ceil --json
    sed 's/"seconds":[^,]*,//; s/q*many//' "$out" >"$work/report"
    printf '#!/bin/sh\nexec taskset -c "$(taskset -cp $$ | sed "s/.*[:,-] *//")" "%s" "$@"\n' "$command" >"$work/alone"
    chmod +x "$work/alone"
    (
        command=$work/alone
        expect 0 quantize "$work/apart" "$work/one" --to modelopt --rule ceil --json
    )
    sed 's/"seconds":[^,]*,//; s/one"/"/' "$out" | cmp - "$work/report" || die "one thread reports something else:"
    same "$work/many/model.safetensors" "$work/one/model.safetensors"
fi

# A table for people.
expect 0 quantize "$work/apart" "$work/table" --to compressed-tensors
for text in "layout compressed-tensors, rule even" "tensors of largest error" "saturated" "zero blocks"; do
    says "$out" "$text"
done

# Refusals: what a layout cannot say, a folder that holds something, experts that are quantised already.
expect 1 quantize "$work/apart" "$work/x" --to gpt-oss
says "$err" 'model_type "qwen3_moe": the layout gpt-oss would lose its activation and router parameters'
expect 1 quantize "$work/dense_BF16" "$work/x" --to deepseek-v4
says "$err" "would lose"
expect 1 quantize "$work/apart" "$work/table" --to compressed-tensors
says "$err" "holds a checkpoint; --force replaces it"
expect 0 quantize "$work/apart" "$work/table" --to compressed-tensors --rule mse --force
expect 1 quantize "$model" "$work/x" --to gpt-oss
says "$err" "no expert weights"
[ ! -e "$work/x" ] || die "a refusal left $work/x"

# Shards with an index; an unfinished job goes on where it stopped, and another job's shards are not touched.
expect 0 quantize "$work/apart" "$work/shards" --to compressed-tensors --shard-bytes 40000 --json
json shards_kept=0
shards=$(ls "$work/shards" | grep -c '^model-')
[ "$shards" -gt 3 ] || die "only $shards shards"
expect 0 run "$work/shards" --tokens 3 --check
rm "$work/shards/config.json" "$work/shards/model-00002-of-"*
cp "$work/shards/model-00001-of-"* "$work/first"
expect 1 quantize "$work/apart" "$work/shards" --to compressed-tensors --shard-bytes 40000 --rule mse
says "$err" "not of this job"
expect 0 quantize "$work/apart" "$work/shards" --to compressed-tensors --shard-bytes 40000 --json
json shards=$shards shards_kept=$((shards - 1))
cmp "$work/first" "$work/shards/model-00001-of-"*
expect 0 quantize "$work/apart" "$work/shards" --to compressed-tensors --shard-bytes 40000 --force
says "$out" "what was kept is not measured again"
expect 0 run "$work/shards" --tokens 3 --check

# A full disk: a message, no half-written file, and the job can go on.
status=0
(ulimit -f 60 && exec "$command" quantize "$work/apart" "$work/full" --to compressed-tensors) \
    >"$out" 2>"$err" || status=$?
[ $status -eq 1 ] || die "a full disk: exit status $status, expected 1"
[ -z "$(ls "$work/full")" ] || die "a full disk left $(ls "$work/full")"
expect 0 quantize "$work/apart" "$work/full" --to compressed-tensors
