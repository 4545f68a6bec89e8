# Writes OUTPUT, which defines commit_id(), if the commit of SOURCE has changed.  Run at every build.
execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed OR commit STREQUAL "")
    set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
#include "commit.h"

const char *commit_id(void)
{
    return "@commit@";
}
]] @ONLY)
