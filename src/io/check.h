/* What every public function of io checks first. */
#ifndef MOE4_IO_CHECK_H
#define MOE4_IO_CHECK_H

#include "context.h"

/* MOE4_OK if the context can be used and the argument is not NULL. */
static inline moe4_status check_argument(moe4_context *context, const char *name, const void *argument)
{
    if (!context) return MOE4_EINVAL;
    if (context->status != MOE4_OK) return context->status;
    return argument ? MOE4_OK : context_fail(context, MOE4_EINVAL, "%s is NULL", name);
}

#endif
