/* A pass against the oracle: every stage from the library's own output of the stage before, on a sample of tokens. */
#ifndef MOE4_CLI_VERIFY_H
#define MOE4_CLI_VERIFY_H

#include <jansson.h>

#include "machine.h"
#include "pass.h"
#include "ref.h"

typedef enum verify_stage {
    VERIFY_ROUTER,       /* logits from x; passes that use the layer's own router */
    VERIFY_ROUTING,      /* ids and weights from logits, or as they were given, bit for bit */
    VERIFY_INTERMEDIATE, /* v' from x */
    VERIFY_GEMM2,        /* z' from v' */
    VERIFY_OUTPUT,       /* y from z' and weights, bit for bit */
    VERIFY_STAGES
} verify_stage;

/* "router", "routing", "intermediate", "gemm2", "output" */
const char *verify_stage_name(verify_stage stage);

struct verify_report {
    int64_t n_tokens; /* sampled */
    ref_mode mode;
    ref_verdict stages[VERIFY_STAGES]; /* n_checked 0 = the pass has no such stage */
    ref_frobenius frobenius;           /* sampled rows of y against the oracle's whole layer with the same roundings */
};

/* How much of the oracle's time a check may take, in multiplications. */
enum { VERIFY_QUICK = 100000000, VERIFY_THOROUGH = 400000000 };

/* Checks up to 16 tokens of a pass with all stages (pass_forward, FORWARD_ALL), fewer of a large layer: as many as
 * `work` pays for, but one at least. */
int verify_pass(const moe4_layer_config *config, const moe4_expert_source *source, const struct machine *machine,
                const struct pass *pass, int64_t work, struct verify_report *report);

/* Whether the whole layer of the sampled tokens is close enough. */
int verify_layer_is_close(const struct verify_report *report);

/* Whether every stage is within its bound and the whole layer close enough. */
int verify_is_good(const struct verify_report *report);

/* The worst ratio of all stages. */
double verify_worst_ratio(const struct verify_report *report);

/* {"intermediate": ratio, ..., "frobenius": error} */
json_t *verify_json(const struct verify_report *report);

/* The same for a person. */
void verify_print(const struct verify_report *report);

#endif
