# The CUDA backend, where nvcc is found.  The runtime is linked statically and finds the driver at run time, so that the
# same library loads on machines without one.
find_program(MOE4_NVCC nvcc HINTS /usr/local/cuda/bin)
mark_as_advanced(MOE4_NVCC)
if(MOE4_CUDA STREQUAL "ON" AND NOT MOE4_NVCC)
    message(FATAL_ERROR "MOE4_CUDA is ON, but nvcc is not found: add it to PATH or set MOE4_NVCC")
endif()
set(usable 1)
if(NOT BUILD_SHARED_LIBS OR MOE4_SANITIZE OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(usable 0) # an archive would pass the CUDA runtime on to every program; sanitizers do not know its memory
endif()
if(MOE4_CUDA STREQUAL "OFF" OR NOT MOE4_NVCC OR (MOE4_CUDA STREQUAL "AUTO" AND NOT usable))
    message(STATUS "CUDA backend: no")
    return()
endif()
message(STATUS "CUDA backend: ${MOE4_NVCC}")

get_filename_component(cuda_root ${MOE4_NVCC} REALPATH)
cmake_path(GET cuda_root PARENT_PATH cuda_root)
cmake_path(GET cuda_root PARENT_PATH cuda_root)
find_library(MOE4_CUDART cudart_static HINTS ${cuda_root}/lib64 ${cuda_root}/lib REQUIRED)
mark_as_advanced(MOE4_CUDART)

# gemm, resident, stream and fp8 are for Hopper alone; everything else runs on all GPUs from sm_80 on, those to come by way of PTX.
set(for_hopper -gencode arch=compute_90a,code=sm_90a)
set(for_all -gencode arch=compute_80,code=sm_80 ${for_hopper} -gencode arch=compute_90,code=compute_90)
set(cuda_objects)
foreach(name combine exact fp8 fp8_exact fp8_few fp8_narrow fp8_one fp8_rows fp8_stream gemm gemm_mma group group_cluster pack quantize resident route rows stream stream_few stream_one)
    set(source ${PROJECT_SOURCE_DIR}/src/cuda/${name}.cu)
    set(object ${PROJECT_BINARY_DIR}/cuda/${name}.o)
    set(targets ${for_all})
    if(name MATCHES "^(gemm|resident|stream|stream_few|stream_one|fp8.*)$")
        set(targets ${for_hopper})
    endif()
    add_custom_command(OUTPUT ${object} DEPENDS ${source} DEPFILE ${object}.d VERBATIM COMMENT "nvcc ${name}.cu"
        COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/cuda
        COMMAND ${MOE4_NVCC} -std=c++17 -O3 --fmad=false ${targets}
            -Xcompiler -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics -I${PROJECT_SOURCE_DIR}/src
            -I${PROJECT_SOURCE_DIR}/include -MD -MF ${object}.d -c ${source} -o ${object})
    list(APPEND cuda_objects ${object})
endforeach()
add_library(moe4_cuda STATIC ${cuda_objects})
set_target_properties(moe4_cuda PROPERTIES LINKER_LANGUAGE C)
target_link_libraries(moe4_cuda PUBLIC ${MOE4_CUDART} ${CMAKE_DL_LIBS} rt Threads::Threads)

target_sources(moe4_objects PRIVATE
    src/cuda/backend.c src/cuda/device.c src/cuda/fill.c src/cuda/forward.c src/cuda/forward_fp8.c
    src/cuda/forward_rows.c
    src/cuda/isa.c src/cuda/layout.c src/cuda/prepared.c src/cuda/tiling.c src/cuda/upload.c src/cuda/workspace.c)
target_compile_definitions(moe4_objects PRIVATE MOE4_HAS_CUDA)
target_include_directories(moe4_objects SYSTEM PRIVATE ${cuda_root}/include)
target_link_libraries(moe4_objects PUBLIC moe4_cuda)
