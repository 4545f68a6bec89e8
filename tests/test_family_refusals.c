/* What no layout may pass over in silence: configs that ask for what is not supported, and tensors that contradict
 * them. Each case changes a few words of a file that generate.py wrote. */
#include "io_helpers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* text with the first `old` in it replaced, or all of them; free it. */
static char *replace(const char *text, size_t n_bytes, const char *old, const char *new, int all, size_t *n_result)
{
    size_t n_old = strlen(old), n_new = strlen(new), n = 0;
    char *result = malloc(n_bytes * 3 + n_new + 1);
    int n_found = 0;
    assert_non_null(result);
    for (size_t i = 0; i < n_bytes;) {
        if ((all || !n_found) && n_bytes - i >= n_old && memcmp(text + i, old, n_old) == 0) {
            memcpy(result + n, new, n_new);
            n += n_new;
            i += n_old;
            n_found++;
        } else {
            result[n++] = text[i++];
        }
    }
    if (!n_found) fail_msg("there is no %s", old);
    *n_result = n;
    return result;
}

static char *load_family(const char *name, const char *file, size_t *n_bytes)
{
    char path[512];
    snprintf(path, sizeof path, "%s/families/%s/%s", TEST_DATA, name, file);
    return (char *)load_bytes(path, n_bytes);
}

static void copy_config(struct fixture *fixture, const char *name, const char *old, const char *new)
{
    size_t n_bytes, n_result;
    char *text = load_family(name, "config.json", &n_bytes);
    char *changed = replace(text, n_bytes, old, new, 0, &n_result);
    scratch_write(&fixture->scratch, "config.json", changed, n_result);
    free(changed);
    free(text);
}

/* Changes the header and its length; offsets count from its end. */
static void copy_tensors(struct fixture *fixture, const char *name, const char *old, const char *new, int all)
{
    size_t n_bytes, n_header;
    char *file = load_family(name, "model.safetensors", &n_bytes);
    uint64_t length;
    memcpy(&length, file, sizeof length);
    char *header = replace(file + 8, length, old, new, all, &n_header);
    size_t n_result = n_bytes - length + n_header;
    char *result = malloc(n_result);
    assert_non_null(result);
    memcpy(result, &(uint64_t){n_header}, 8);
    memcpy(result + 8, header, n_header);
    memcpy(result + 8 + n_header, file + 8 + length, n_bytes - 8 - length);
    scratch_write(&fixture->scratch, "model.safetensors", result, n_result);
    free(result);
    free(header);
    free(file);
}

/* ---- Configs ----------------------------------------------------------------------------------------------------- */

static void test_configs(void **state)
{
    static const struct {
        const char *family, *old, *new;
        moe4_status status;
        const char *message;
    } cases[] = {
        /* compressed-tensors */
        {"qwen3", "mxfp4-pack-quantized", "nvfp4-pack-quantized", MOE4_EUNSUPPORTED,
         "quantization_config.format is \"nvfp4-pack-quantized\", expected \"mxfp4-pack-quantized\""},
        {"ling", "mxfp4-pack-quantized", "int-quantized", MOE4_EUNSUPPORTED, "quantization_config.format is missing"},
        {"qwen3", "\"num_bits\": 4", "\"num_bits\": 8", MOE4_EUNSUPPORTED, "num_bits 4 and type float"},
        {"qwen3", "\"type\": \"float\"", "\"type\": \"int\"", MOE4_EUNSUPPORTED, "num_bits 4 and type float"},
        {"qwen3", "\"group_size\": 32", "\"group_size\": 16", MOE4_EUNSUPPORTED, "group_size 32"},
        {"qwen3", "\"symmetric\": true", "\"symmetric\": false", MOE4_EUNSUPPORTED, "zero points"},
        {"qwen3", "\"input_activations\": null", "\"input_activations\": {\"dynamic\": false}", MOE4_EUNSUPPORTED,
         "input_global_scale is not supported"},
        {"qwen3", "config_groups", "groups", MOE4_EFORMAT, "config_groups is missing"},
        {"qwen3", "compressed-tensors", "awq", MOE4_EUNSUPPORTED, "quantization_config.quant_method is \"awq\""},
        /* models */
        {"qwen3", "qwen3_moe", "qwen9_moe", MOE4_EUNSUPPORTED, "model_type is \"qwen9_moe\""},
        {"qwen3", "norm_topk_prob", "norm", MOE4_EFORMAT, "norm_topk_prob is missing, expected true or false"},
        {"qwen3", "\"norm_topk_prob\": true", "\"norm_topk_prob\": 1", MOE4_EFORMAT, "norm_topk_prob is 1"},
        {"qwen3", "\"silu\"", "\"relu\"", MOE4_EUNSUPPORTED, "hidden_act is \"relu\", expected silu"},
        {"qwen3", "hidden_act", "act", MOE4_EFORMAT, "hidden_act is missing"},
        {"qwen3", "num_experts\"", "experts\"", MOE4_EFORMAT, "n_routed_experts is missing"},
        {"qwen3", "\"num_experts\": 4", "\"num_experts\": 4, \"n_routed_experts\": 8", MOE4_EFORMAT,
         "num_experts is 4, expected 8 as n_routed_experts says"},
        {"qwen3", "moe_intermediate_size", "moe_size", MOE4_EFORMAT, "moe_intermediate_size is missing"},
        {"kimi_k3", "activation_situ_beta", "beta", MOE4_EFORMAT, "activation_situ_beta is missing"},
        {"kimi_k3", "\"activation_situ_linear_beta\": 25.0", "\"activation_situ_linear_beta\": 0", MOE4_EFORMAT,
         "activation_situ_linear_beta is 0, expected a finite number above 0"},
        {"kimi_k3", "\"sigmoid\"", "\"tanh\"", MOE4_EUNSUPPORTED, "moe_router_activation_func is \"tanh\""},
        {"kimi_k3", "\"moe_renormalize\": true", "\"moe_renormalize\": false", MOE4_EUNSUPPORTED,
         "moe_renormalize is false"},
        {"kimi_k3", "\"routed_expert_hidden_size\": 32", "\"routed_expert_hidden_size\": 48", MOE4_EUNSUPPORTED,
         "routed_expert_hidden_size is 48, expected a multiple of 32"},
        {"kimi_k3", "\"routed_scaling_factor\": 2.5", "\"routed_scaling_factor\": -1", MOE4_EFORMAT,
         "routed_scaling_factor is -1"},
        {"minimax_m3", "swiglu_alpha", "alpha", MOE4_EFORMAT, "swiglu_alpha is missing"},
        {"minimax_m3", "swiglu_limit", "limit", MOE4_EFORMAT, "swiglu_limit is missing"},
        {"ling", "topk_group", "top_group", MOE4_EFORMAT, "topk_group is missing"},
        {"ling", "\"topk_group\": 1", "\"topk_group\": 3", MOE4_EFORMAT, "topk_group is 3, expected"},
        {"deepseek_v3", "\"sigmoid\"", "\"softmax\"", MOE4_EUNSUPPORTED, "n_group is 2"},
        {"deepseek_v3", "noaux_tc", "group_limited_greedy", MOE4_EUNSUPPORTED, "topk_method"},
        /* DeepSeek-V4 */
        {"deepseek_v4", "\"fp4\"", "\"fp8\"", MOE4_EUNSUPPORTED, "expert_dtype is \"fp8\", expected \"fp4\""},
        {"deepseek_v4", "expert_dtype", "dtype", MOE4_EUNSUPPORTED, "expert_dtype is missing"},
        {"deepseek_v4", "ue8m0", "float", MOE4_EUNSUPPORTED, "scale_fmt is \"float\""},
        {"deepseek_v4", "\"norm_topk_prob\": true", "\"norm_topk_prob\": false", MOE4_EUNSUPPORTED, "norm_topk_prob"},
        {"deepseek_v4", "\"num_hash_layers\": 1", "\"num_hash_layers\": 3", MOE4_EFORMAT, "num_hash_layers is 3"},
        {"deepseek_v4", "\"fp8\"", "\"fp4\"", MOE4_EUNSUPPORTED, "quantization_config.quant_method is \"fp4\""},
        /* Quark */
        {"quark", "\"dtype\": \"fp4\"", "\"dtype\": \"fp8\"", MOE4_EUNSUPPORTED, "weights of dtype fp4"},
        {"quark", "\"group_size\": 32", "\"group_size\": 16", MOE4_EUNSUPPORTED, "group_size 32"},
        {"quark", "per_group", "per_tensor", MOE4_EUNSUPPORTED, "qscheme per_group"},
        {"quark", "\"lm_head\"", "7", MOE4_EFORMAT, "exclude is an array, expected a list of names"},
        {"quark", "e8m0", "fp8", MOE4_EUNSUPPORTED, "scale_format e8m0"},
        {"quark", "\"pack_method\": \"reorder\"", "\"pack_method\": \"x\"", MOE4_EUNSUPPORTED, "pack_method is \"x\""},
        {"quark", "[\n   \"lm_head\"", "{\"a\": [\"lm_head\"", MOE4_EFORMAT, "config.json: byte"},
        {"quark", "\"exclude\": [", "\"exclude\": 3, \"x\": [", MOE4_EFORMAT, "exclude is 3, expected a list of names"},
        {"qwen3", "\"format\"", "\"ignore\": [[]], \"format\"", MOE4_EFORMAT,
         "ignore is an array, expected a list of names"},
        /* modelopt, MLX */
        {"modelopt", "\"MXFP4\"", "\"MXFP4\", \"group_size\": 16", MOE4_EUNSUPPORTED,
         "group_size is 16, expected group_size 32"},
        {"modelopt", "\"MXFP4\"", "\"MXFP4\", \"ignore\": {}", MOE4_EFORMAT,
         "ignore is an object, expected a list of names"},
        {"modelopt", "\"MXFP4\"", "\"MIXED_PRECISION\"", MOE4_EFORMAT,
         "quantized_layers is missing, expected an object"},
        {"modelopt", "\"MXFP4\"", "\"MIXED_PRECISION\", \"quantized_layers\": {\"a\": {\"quant_algo\": \"FP8\"}}",
         MOE4_EUNSUPPORTED, "quantized_layers is an object, expected a layer in MXFP4"},
        {"modelopt", "\"MXFP4\"",
         "\"MIXED_PRECISION\", \"quantized_layers\": {\"a\": {\"quant_algo\": \"MXFP4\", \"group_size\": 16}}",
         MOE4_EUNSUPPORTED, "expected group_size 32 where layers are in MXFP4"},
        {"modelopt", "MXFP4", "NVFP4", MOE4_EUNSUPPORTED, "quant_algo is \"NVFP4\""},
        {"mlx", "\"mode\": \"mxfp4\"", "\"mode\": \"affine\"", MOE4_EUNSUPPORTED, "quantization.mode is \"affine\""},
        {"mlx", "\"mode\"", "\"mood\"", MOE4_EUNSUPPORTED, "quantization.mode is missing"},
        {"mlx", "\"bits\": 4", "\"bits\": 8", MOE4_EFORMAT, "quantization.bits is 8"},
        {"mlx", "\"group_size\": 32", "\"group_size\": 64", MOE4_EFORMAT, "quantization.group_size is 64"},
        /* gpt-oss's own files */
        {"openai", "swiglu_limit\": 7.0", "swiglu_limit\": 0", MOE4_EFORMAT, "swiglu_limit is 0"},
        {"openai", "num_experts\"", "experts\"", MOE4_EUNSUPPORTED, "quantization_config.quant_method is missing"},
    };
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    /* No tensor file at all: each of these is refused before one is looked for. */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe4_checkpoint *checkpoint;
        copy_config(fixture, cases[i].family, cases[i].old, cases[i].new);
        moe4_status status = moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint);
        if (status != cases[i].status || !strstr(context->message, cases[i].message))
            fail_msg("%s, %s: status %d, \"%s\"", cases[i].family, cases[i].new, status, context->message);
        assert_null(checkpoint);
    }
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* Opens the checkpoint and the layer. */
static moe4_status open_layer(struct fixture *fixture, int32_t layer)
{
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint;
    moe4_layer_reader *reader;
    moe4_status status = moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint);
    if (status != MOE4_OK) return status;
    status = moe4_layer_reader_open(context, checkpoint, layer, NULL, &reader);
    moe4_layer_reader_close(reader);
    moe4_checkpoint_close(checkpoint);
    return status;
}

/* The config as it is, the tensors changed. */
static void test_tensors(void **state)
{
    static const struct {
        const char *family, *old, *new;
        int all;
        moe4_status status;
        const char *message;
    } cases[] = {
        {"qwen3", "experts.3.up_proj.weight_packed", "x", 0, MOE4_EFORMAT,
         "tensor \"model.layers.1.mlp.experts.3.up_proj.weight_packed\" is missing, expected U8 [32, 2, 16]"},
        {"qwen3", "experts.2.down_proj.weight_scale", "x", 0, MOE4_EFORMAT,
         "weight_scale\" is missing, expected U8 [64, 1]"},
        {"qwen3", "experts.3.up_proj.weight_packed", "experts.4.up_proj.weight_packed", 0, MOE4_EFORMAT,
         "is of expert 4, but config.json has 4 experts"},
        {"qwen3", "layers.1.mlp.experts.0.up_proj.weight_packed", "layers.2.mlp.experts.0.up_proj.weight_packed", 0,
         MOE4_EFORMAT, "is of layer 2, but config.json has 2 layers"},
        {"qwen3", "[32,32]", "[16,64]", 0, MOE4_EFORMAT, "is U8 [16, 64], expected U8 [32, 2, 16]"},
        {"qwen3", "experts.1.up_proj.weight_scale", "experts.1.up_proj.weight_zero_point", 0, MOE4_EUNSUPPORTED,
         "weight_zero_point\": not supported"},
        {"qwen3", "experts.1.up_proj.weight_scale", "experts.1.up_proj.input_global_scale", 0, MOE4_EUNSUPPORTED,
         "input_global_scale\": not supported"},
        {"qwen3", "experts.1.up_proj.weight_scale", "experts.1.up_proj.magic", 0, MOE4_EFORMAT,
         "unknown expert tensor"},
        {"qwen3", "mlp.gate.weight", "mlp.door.weight", 0, MOE4_EFORMAT, "mlp.gate.weight\" is missing"},
        {"ling", "shared_experts.gate_proj.weight\":{\"dtype\":\"BF16\",\"shape\":[4,2]",
         "gate.bias\":{\"dtype\":\"BF16\",\"shape\":[8]", 0, MOE4_EUNSUPPORTED, "bias of logits or of the selection"},
        {"ling", "expert_bias", "bias_of_experts", 0, MOE4_EFORMAT, "e_score_correction_bias\" is missing"},
        {"deepseek_v3", "gate.e_score_correction_bias", "x", 0, MOE4_EFORMAT,
         "gate.e_score_correction_bias\" is missing, expected BF16 [4]"},
        {"kimi_k3", "experts.0.w1.weight_packed\":{\"dtype\":\"U8\",\"shape\":[32,16]",
         "experts.0.w1.weight_packed\":{\"dtype\":\"U8\",\"shape\":[16,32]", 0, MOE4_EFORMAT,
         "is U8 [16, 32], expected U8 [32, 1, 16]"},
        {"mlx", "experts.up_proj.bias", "experts.up_proj.biases", 0, MOE4_EUNSUPPORTED, "biases\": not supported"},
        {"mlx", "experts.up_proj.bias", "x", 0, MOE4_EFORMAT, "up_proj.bias\" is missing"},
        {"openai", "mlp1_weight.scales", "mlp1_weight.scale", 0, MOE4_EFORMAT, "mlp1_weight.scales\" is missing"},
        {"openai", "\"block.1.mlp.gate.bias\"", "\"x\"", 0, MOE4_EFORMAT, "block.1.mlp.gate.bias\" is missing"},
        {"quark", "layers.1.mlp.experts.2.gate_proj.weight\":{\"dtype\":\"U8\",\"shape\":[32,32]",
         "layers.1.mlp.experts.2.gate_proj.weight\":{\"dtype\":\"BF16\",\"shape\":[32,16]", 0, MOE4_EFORMAT,
         "experts.2.gate_proj.weight\" is BF16 [32, 16], expected U8"},
        {"quark", "experts.2.gate_proj.input_scale", "experts.2.gate_proj.weight_scale_2", 0, MOE4_EUNSUPPORTED,
         "weight_scale_2\": not supported"},
        {"deepseek_v4", "\"layers.1.ffn.gate.bias\"", "\"x\"", 0, MOE4_OK, NULL}, /* zero where nobody requires it */
    };
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        copy_config(fixture, cases[i].family, "{", "{");
        copy_tensors(fixture, cases[i].family, cases[i].old, cases[i].new, cases[i].all);
        context->message[0] = '\0';
        moe4_status status = open_layer(fixture, 1);
        if (status != cases[i].status || (cases[i].message && !strstr(context->message, cases[i].message)))
            fail_msg("%s, %s: status %d, \"%s\"", cases[i].family, cases[i].new, status, context->message);
    }
}

/* The tensors as they are, the config changed. */
static void test_contradictions(void **state)
{
    static const struct {
        const char *family, *old, *new;
        int32_t layer;
        moe4_status status;
        const char *message;
    } cases[] = {
        {"deepseek_v4", "\"num_hash_layers\": 1", "\"num_hash_layers\": 0", 0, MOE4_EFORMAT,
         "\"layers.0.ffn.gate.tid2eid\" is there, but the config has 0 hash layers"},
        {"deepseek_v4", "\"num_hash_layers\": 1", "\"num_hash_layers\": 2", 1, MOE4_EFORMAT,
         "\"layers.1.ffn.gate.tid2eid\" is missing, expected I64 [10, 2]"},
        {"deepseek_v4", "\"vocab_size\": 10", "\"vocab_size\": 11", 0, MOE4_EFORMAT,
         "is I64 [10, 2], expected I64 [11, 2]"},
        {"deepseek_v4", "\"vocab_size\": 10,", "", 0, MOE4_OK, NULL},
        {"deepseek_v4", "num_nextn_predict_layers", "x", 0, MOE4_EFORMAT,
         "is of layer 2, but config.json has 2 layers"},
        {"deepseek_v4", "\"n_routed_experts\": 4", "\"n_routed_experts\": 5", 1, MOE4_EFORMAT,
         "\"layers.1.ffn.gate.weight\" is BF16 [4, 64], expected BF16 [5, 64]"},
        {"deepseek_v4", "\"moe_intermediate_size\": 32", "\"moe_intermediate_size\": 64", 1, MOE4_EFORMAT,
         "experts.0.w1.weight\" is I8 [32, 32], expected U8 [64, 2, 16]"},
        {"ling", "\"moe_router_enable_expert_bias\": true", "\"moe_router_enable_expert_bias\": false", 1, MOE4_EFORMAT,
         "gate.expert_bias\" is there, but by the config this router has none"},
        {"kimi_k3", "\"routed_expert_hidden_size\": 32,", "", 1, MOE4_EFORMAT,
         "is U8 [32, 16], expected U8 [32, 2, 16]"},
        {"kimi_k3", "\"activation_situ_linear_beta\": 25.0", "\"activation_situ_linear_beta\": null", 1, MOE4_OK, NULL},
        {"qwen3", "\"hidden_size\": 64", "\"hidden_size\": 96", 1, MOE4_EFORMAT,
         "is BF16 [4, 64], expected BF16 [4, 96]"},
        {"qwen3", "\"norm_topk_prob\": true", "\"norm_topk_prob\": false", 1, MOE4_OK, NULL},
        {"ling", "\"n_group\": 2", "\"n_group\": 3", 1, MOE4_EFORMAT,
         "n_group is 3, expected a divisor of the 4 experts"},
        {"ling", "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 3", 1, MOE4_EFORMAT,
         "top_k is 3, but topk_group 1"},
        {"quark", "lm_head", "*.experts.3.*", 1, MOE4_EFORMAT,
         "experts.3.gate_proj.weight\" is U8 [32, 32], but config.json excludes \"*.experts.3.*\""},
        {"quark", "lm_head", "model.layers.1.mlp.experts.0.down_proj", 1, MOE4_EFORMAT, "experts.0.down_proj\" from"},
        {"quark", "lm_head", "model.layers.0.mlp.experts*", 1, MOE4_OK, NULL},
        {"quark", "lm_head", "*.experts.3", 1, MOE4_OK, NULL},
        {"quark", "lm_head", "re:.*\\\\.experts\\\\.3\\\\.(up|down)_proj", 1, MOE4_EFORMAT,
         "experts.3.up_proj.weight\" is U8 [32, 32], but config.json excludes \"re:"},
        {"quark", "lm_head", "re:.*\\\\.experts\\\\.[4-9]\\\\.", 1, MOE4_OK, NULL},
        {"quark", "lm_head", "re:(?=model).*", 1, MOE4_OK, NULL}, /* not read: the tensors' types tell */
        {"qwen3", "\"format\"", "\"ignore\": [\"lm_head\", \"re:.*experts.*\"], \"format\"", 1, MOE4_EFORMAT,
         "but config.json excludes \"re:.*experts.*\" from"},
        {"qwen3", "\"format\"", "\"ignore\": [\"lm_head\", \"re:.*self_attn.*\"], \"format\"", 1, MOE4_OK, NULL},
        {"modelopt", "\"MXFP4\"", "\"MXFP4\", \"ignore\": [\"model.layers.1*\"]", 1, MOE4_EFORMAT,
         "config.json excludes \"model.layers.1*\" from"},
        {"modelopt", "\"MXFP4\"", "\"MXFP4\", \"exclude_modules\": [\"model.layers.1.mlp.experts.2.up_proj\"]", 1,
         MOE4_EFORMAT, "config.json excludes \"model.layers.1.mlp.experts.2.up_proj\" from"},
        {"modelopt", "\"MXFP4\"",
         "\"MIXED_PRECISION\", \"quantized_layers\": {\"a\": {\"quant_algo\": \"FP8\"}, \"b\": {\"quant_algo\": "
         "\"W4A8_MXFP4_FP8\", \"group_size\": 32}}",
         1, MOE4_OK, NULL},
        /* Layers for multi-token prediction that are numbered on. */
        {"deepseek_v3", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1, \"num_nextn_predict_layers\": 1", 1,
         MOE4_OK, NULL},
        {"quark", "qwen3_moe", "qwen3_next", 0, MOE4_EINVAL, "layer 0 is not here"},
    };
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        copy_tensors(fixture, cases[i].family, "{", "{", 0);
        copy_config(fixture, cases[i].family, cases[i].old, cases[i].new);
        moe4_status status = open_layer(fixture, cases[i].layer);
        if (status != cases[i].status || (cases[i].message && !strstr(context->message, cases[i].message)))
            fail_msg("%s, %s: status %d, \"%s\"", cases[i].family, cases[i].new, status, context->message);
    }
}

/* The same bytes by other types, and other places of the names in use. */
static void test_equivalent_names(void **state)
{
    static const struct {
        const char *family, *old, *new;
    } cases[] = {
        {"qwen3", "[32,32]", "[32,2,16]"},
        {"qwen3", "\"U8\",\"shape\":[32,32]", "\"I8\",\"shape\":[32,32]"},
        {"qwen3", "\"U8\",\"shape\":[32,32]", "\"F4\",\"shape\":[32,64]"},
        {"qwen3", "\"U8\",\"shape\":[32,32]", "\"U32\",\"shape\":[32,8]"},
        {"qwen3", "\"U8\",\"shape\":[32,2]", "\"F8_E8M0\",\"shape\":[32,2]"},
        {"deepseek_v4", "\"I8\",\"shape\":[32,32]", "\"U8\",\"shape\":[32,2,16]"},
        {"kimi_k3", "\"language_model.model.layers", "\"model.layers"},
        {"minimax_m3", "block_sparse_moe", "mlp"},
        {"deepseek_v4", "\"layers.", "\"model.layers."},
        {"mlx", ".mlp.experts.", ".mlp.switch_mlp."},
    };
    struct fixture *fixture = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        copy_config(fixture, cases[i].family, "{", "{");
        copy_tensors(fixture, cases[i].family, cases[i].old, cases[i].new, 1);
        if (open_layer(fixture, 1) != MOE4_OK)
            fail_msg("%s, %s: %s", cases[i].family, cases[i].new, fixture->test.context.message);
    }
}

/* Words that mean what the usual ones do. */
static void test_equivalent_configs(void **state)
{
    static const struct {
        const char *family, *old, *new;
    } cases[] = {
        {"mlx", "\"quantization\"", "\"quantization_config\": {\"quant_method\": \"mxfp4\"}, \"quantization\""},
        {"mlx", "\"quantization\"", "\"quantization_config\""},
        {"qwen3", "\"num_experts\"", "\"num_local_experts\""},
        {"kimi_k3", "num_experts_per_token", "num_experts_per_tok"},
        {"kimi_k3", "\"model_type\": \"kimi_k3\"", "\"model_type\": \"kimi_k3_text\""},
        {"kimi_k3", "\"moe_router_activation_func\": \"sigmoid\",", ""},
        {"ling", "\"score_function\": \"sigmoid\",", "\"score_function\": null,"},
        {"quark", "\"weight\": {", "\"weight\": {\"x\": [{}], "},
        {"deepseek_v4", "\"num_hash_layers\": 1,", "\"num_hash_layers\": 1, \"n_group\": 1, \"topk_group\": 1,"},
    };
    struct fixture *fixture = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        copy_tensors(fixture, cases[i].family, "{", "{", 0);
        copy_config(fixture, cases[i].family, cases[i].old, cases[i].new);
        moe4_status status = open_layer(fixture, 1);
        if (status != MOE4_OK) fail_msg("%s, %s: %s", cases[i].family, cases[i].new, fixture->test.context.message);
    }
}

/* modelopt's own file, alone and beside a config that names modelopt. */
static void test_modelopt_file(void **state)
{
    static const char own[] = "{\"quantization\": {\"quant_algo\": \"W4A16_MXFP4\", \"group_size\": 32}}";
    static const char other[] = "{\"quantization\": {\"quant_algo\": \"W4A16_AWQ\"}}";
    struct fixture *fixture = *state;
    copy_tensors(fixture, "modelopt", "{", "{", 0);
    copy_config(fixture, "modelopt", "\"quantization_config\"", "\"x\"");
    assert_refused(&fixture->test, open_layer(fixture, 1), MOE4_EUNSUPPORTED, "quant_method is missing");
    scratch_write(&fixture->scratch, "hf_quant_config.json", own, sizeof own - 1);
    assert_int_equal(open_layer(fixture, 1), MOE4_OK);
    copy_config(fixture, "modelopt", "\"quant_algo\"", "\"x\"");
    assert_int_equal(open_layer(fixture, 1), MOE4_OK);
    scratch_write(&fixture->scratch, "hf_quant_config.json", other, sizeof other - 1);
    assert_refused(&fixture->test, open_layer(fixture, 1), MOE4_EUNSUPPORTED, "quant_algo is \"W4A16_AWQ\"");
    scratch_write(&fixture->scratch, "hf_quant_config.json", "{", 1);
    assert_refused(&fixture->test, open_layer(fixture, 1), MOE4_EFORMAT, "hf_quant_config.json: byte");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_configs),
        FILE_TEST(test_tensors),
        FILE_TEST(test_contradictions),
        FILE_TEST(test_equivalent_names),
        FILE_TEST(test_equivalent_configs),
        FILE_TEST(test_modelopt_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
