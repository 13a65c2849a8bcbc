# Decides whether the CUDA code is built: FLATSHARD_CUDA=auto|on|off.
# auto means on only when nvcc's major version equals torch's.
set(FLATSHARD_WITH_CUDA OFF)
if(NOT FLATSHARD_CUDA STREQUAL "off")
  find_program(FLATSHARD_NVCC nvcc HINTS /usr/local/cuda/bin)
  set(_nvcc_major "none")
  if(FLATSHARD_NVCC)
    execute_process(COMMAND ${FLATSHARD_NVCC} --version
                    OUTPUT_VARIABLE _nvcc_version)
    string(REGEX MATCH "release ([0-9]+)\\." _m "${_nvcc_version}")
    set(_nvcc_major "${CMAKE_MATCH_1}")
  endif()
  if(_nvcc_major STREQUAL "${FLATSHARD_TORCH_CUDA_MAJOR}")
    set(FLATSHARD_WITH_CUDA ON)
  elseif(FLATSHARD_CUDA STREQUAL "on")
    message(FATAL_ERROR
      "FLATSHARD_CUDA=on expected nvcc ${FLATSHARD_TORCH_CUDA_MAJOR} (torch's "
      "CUDA), got '${_nvcc_major}'. Install that toolkit, or use auto or off.")
  endif()
endif()

if(FLATSHARD_WITH_CUDA)
  set(CMAKE_CUDA_COMPILER ${FLATSHARD_NVCC})
  set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "GPU architectures")
  set(CMAKE_CUDA_STANDARD 20)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  cmake_path(GET FLATSHARD_TORCH_DIR PARENT_PATH _site)
  # The runtime that torch loads, never a second one.
  file(GLOB _cudart ${_site}/nvidia/cu*/lib/libcudart.so.*
       ${_site}/nvidia/cuda_runtime/lib/libcudart.so.*)
  target_include_directories(
    flatshard_torch SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS}
    ${_site}/nvidia/nccl/include)
  target_compile_definitions(flatshard_torch INTERFACE USE_C10D_NCCL=1)
  target_link_libraries(
    flatshard_torch INTERFACE
    -Wl,--no-as-needed
    ${FLATSHARD_TORCH_DIR}/lib/libtorch_cuda.so
    ${FLATSHARD_TORCH_DIR}/lib/libc10_cuda.so
    -Wl,--as-needed
    ${_cudart})
endif()
message(STATUS "flatshard CUDA: ${FLATSHARD_WITH_CUDA}")
