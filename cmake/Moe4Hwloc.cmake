# NUMA placement, where hwloc.h is found.  libhwloc itself is loaded at run time, on machines with several nodes, so that
# neither the library nor programs depend on it.
include(CheckIncludeFile)
if(NOT MOE4_HWLOC STREQUAL "OFF")
    check_include_file(hwloc.h MOE4_HAS_HWLOC_H)
endif()
if(MOE4_HAS_HWLOC_H AND NOT MOE4_HWLOC STREQUAL "OFF")
    target_compile_definitions(moe4_objects PRIVATE MOE4_HAS_HWLOC)
elseif(MOE4_HWLOC STREQUAL "ON")
    message(FATAL_ERROR "MOE4_HWLOC is ON, but hwloc.h is not found: install libhwloc-dev")
endif()
