# Compiler flags of every target of this project.
add_library(moe4_flags INTERFACE)
target_compile_features(moe4_flags INTERFACE c_std_17)
set(CMAKE_C_EXTENSIONS ON) # pread, pthread affinity
target_compile_definitions(moe4_flags INTERFACE _GNU_SOURCE _FILE_OFFSET_BITS=64)
target_compile_options(moe4_flags INTERFACE
    -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wpointer-arith -Wwrite-strings
    # An fma is written where one is meant, and NaN and infinities are ordinary values.
    -ffp-contract=off -fno-strict-aliasing -fno-math-errno
    $<$<BOOL:${MOE4_WERROR}>:-Werror>)
if(MOE4_SANITIZE)
    target_compile_options(moe4_flags INTERFACE
        -fsanitize=${MOE4_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
    add_link_options(-fsanitize=${MOE4_SANITIZE})
else()
    add_link_options(-Wl,-z,defs) # libmoe4 names everything it needs; a sanitizer's runtime comes with the program
endif()

# A build without a type would not be optimised.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()
