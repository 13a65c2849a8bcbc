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
  if(FLATSHARD_TORCH_CUDA_MAJOR
     AND _nvcc_major STREQUAL "${FLATSHARD_TORCH_CUDA_MAJOR}")
    set(FLATSHARD_WITH_CUDA ON)
  elseif(FLATSHARD_CUDA STREQUAL "on")
    message(FATAL_ERROR
      "FLATSHARD_CUDA=on expected nvcc ${FLATSHARD_TORCH_CUDA_MAJOR} (torch's "
      "CUDA), got '${_nvcc_major}'. Install that toolkit, or use auto or off.")
  endif()
endif()

if(FLATSHARD_WITH_CUDA)
  set(CMAKE_CUDA_COMPILER ${FLATSHARD_NVCC})
  include(gpus)
  flatshard_gpus(CMAKE_CUDA_ARCHITECTURES ${FLATSHARD_NVCC})
  set(CMAKE_CUDA_STANDARD 20)
  # torch's libcudart is linked instead (torch_targets.cmake).
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  enable_language(CUDA)
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    # CMake 3.25.1 knows nvcc's C++ standards only up to 17.
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  find_package(CUDAToolkit REQUIRED)
  target_compile_definitions(flatshard_torch INTERFACE USE_C10D_NCCL=1)
endif()
message(STATUS "flatshard CUDA: ${FLATSHARD_WITH_CUDA}")
if(FLATSHARD_WITH_CUDA)
  message(STATUS "flatshard GPUs: ${CMAKE_CUDA_ARCHITECTURES}")
endif()

include(torch_targets)
flatshard_attach_torch(flatshard_fmt flatshard_torch ${FLATSHARD_TORCH_DIR}
                       ${FLATSHARD_WITH_CUDA})
