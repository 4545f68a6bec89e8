#include "context.h"

#include <stdarg.h>
#include <stdio.h>

moe4_status context_fail(struct moe4_context *context, moe4_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(context->message, sizeof context->message, format, arguments);
    va_end(arguments);
    return status;
}

moe4_status context_fail_memory(struct moe4_context *context, const char *what, size_t bytes)
{
    return context_fail(context, MOE4_ENOMEM, "out of memory: %zu bytes for %s", bytes, what);
}

const char *moe4_context_message(const moe4_context *context)
{
    return context ? context->message : "";
}

const char *moe4_status_name(moe4_status status)
{
    static const char *const names[] = {
        "ok",           "invalid argument", "out of memory", "not supported", "input/output error",
        "format error", "device error"};
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "unknown status";
}

const char *moe4_version(void)
{
#define TEXT(x)                      #x
#define VERSION(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)
    return VERSION(MOE4_VERSION_MAJOR, MOE4_VERSION_MINOR, MOE4_VERSION_PATCH);
}
