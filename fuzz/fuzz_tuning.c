/* A tuning file; %version stands for the library's version.  What loads is the same when it is saved and loaded again.
 */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "backend.h"
#include "container.h"
#include "fuzz.h"
#include "tuning.h"

enum { MAX_ENTRIES = 64 };

static void check_entry(const moe4_tuning_entry *entry)
{
    FUZZ_CHECK(backend_cpu.tactic_is_valid(&entry->tactic) && entry->n_tokens >= 1);
    FUZZ_CHECK(entry->ms >= 0 && entry->default_ms >= 0);
}

static void save_again(moe4_context *context)
{
    moe4_tuning_entry before[MAX_ENTRIES], after;
    const char *path = fuzz_folder_path("tuning.json");
    int32_t n = moe4_tuning_count(context);
    if (n > MAX_ENTRIES) return;
    for (int32_t i = 0; i < n; i++) FUZZ_CHECK(moe4_tuning_get(context, i, &before[i]) == MOE4_OK);
    FUZZ_CHECK(moe4_tuning_save(context, path) == MOE4_OK);
    tuning_release(context);
    moe4_status status = moe4_tuning_load(context, path);
    fuzz_check_status(context, status);
    FUZZ_CHECK(status == MOE4_OK || status == MOE4_ENOMEM);
    for (int32_t i = 0; i < n && status == MOE4_OK; i++) {
        FUZZ_CHECK(moe4_tuning_get(context, i, &after) == MOE4_OK);
        FUZZ_CHECK(memcmp(&before[i], &after, offsetof(moe4_tuning_entry, ms)) == 0);
        FUZZ_CHECK(fabs(before[i].ms - after.ms) <= 1e-15 * before[i].ms);
        FUZZ_CHECK(fabs(before[i].default_ms - after.default_ms) <= 1e-15 * before[i].default_ms);
    }
    unlink(path);
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    static const char *words[] = {"%version", "", NULL};
    words[1] = moe4_version();
    const char *text = expand_words((const char *)data, n_bytes, words);
    moe4_status status = moe4_tuning_load(context, fuzz_file(text, strlen(text)));
    fuzz_check_status(context, status);
    if (status == MOE4_EFORMAT) FUZZ_CHECK(moe4_tuning_count(context) == 0);
    for (int32_t i = 0; i < moe4_tuning_count(context); i++) {
        moe4_tuning_entry entry;
        FUZZ_CHECK(moe4_tuning_get(context, i, &entry) == MOE4_OK);
        check_entry(&entry);
    }
    if (status == MOE4_OK) save_again(context);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
