#include "message.h"

#include <stdarg.h>
#include <stdio.h>

#include "command.h"

static const char *current_verb;

void message_set_verb(const char *verb)
{
    current_verb = verb;
}

static void message_print(const char *format, va_list arguments)
{
    fflush(stdout);    /* so that results and messages keep their order on a terminal */
    flockfile(stderr); /* threads fail line by line */
    fprintf(stderr, current_verb ? "moe4 %s: " : "moe4: ", current_verb);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    funlockfile(stderr);
}

int fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    message_print(format, arguments);
    va_end(arguments);
    return EXIT_FAILED;
}

int fail_usage(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    message_print(format, arguments);
    va_end(arguments);
    return EXIT_USAGE;
}

int fail_library(const moe4_context *context)
{
    return fail("%s", moe4_context_message(context));
}

void note(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    message_print(format, arguments);
    va_end(arguments);
}

int context_open(const moe4_context_config *config, moe4_context **context, moe4_context_info *info)
{
    moe4_status status = moe4_context_create(config, context);
    if (!*context) return fail("no context: %s", moe4_status_name(status));
    if (status == MOE4_OK && (!info || moe4_context_describe(*context, info) == MOE4_OK)) return EXIT_OK;
    int code = fail_library(*context);
    moe4_context_destroy(*context);
    *context = NULL;
    return code;
}

int context_open_simple(int64_t n_threads, moe4_context **context, moe4_context_info *info)
{
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    config.n_threads = (int32_t)n_threads;
    return context_open(&config, context, info);
}
