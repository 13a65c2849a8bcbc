# Decides whether the CUDA code is built: FLATSHARD_CUDA=auto|on|off. auto means
# on where nvcc of torch's CUDA is installed, and an error where a GPU is
# present without it.
set(_python ${FLATSHARD_PYTHON})
if(NOT EXISTS "${_python}")
  set(_python python3)
endif()
execute_process(
  COMMAND ${_python} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/cuda_choice.py decide
          ${FLATSHARD_TORCH_DIR} ${FLATSHARD_CUDA}
  OUTPUT_VARIABLE _choice ERROR_VARIABLE _why
  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _rc)
if(NOT _rc EQUAL 0)
  message(FATAL_ERROR "${_why}")
endif()
list(GET _choice 0 FLATSHARD_WITH_CUDA)
string(TOUPPER ${FLATSHARD_WITH_CUDA} FLATSHARD_WITH_CUDA)
list(GET _choice 1 FLATSHARD_NVCC)
list(GET _choice 2 _why)
message(STATUS "flatshard CUDA: ${FLATSHARD_WITH_CUDA} (${_why})")

if(FLATSHARD_WITH_CUDA)
  set(CMAKE_CUDA_COMPILER ${FLATSHARD_NVCC})
  include(gpus)
  flatshard_gpus(CMAKE_CUDA_ARCHITECTURES ${FLATSHARD_NVCC})
  set(CMAKE_CUDA_STANDARD 20)
  cmake_path(GET FLATSHARD_NVCC PARENT_PATH _bin)
  cmake_path(GET _bin PARENT_PATH _toolkit)
  if(NOT EXISTS ${_toolkit}/lib64)
    # nvcc looks for its own libraries in lib64. pip's packages have them in lib.
    string(APPEND CMAKE_CUDA_FLAGS " -L${_toolkit}/lib")
  endif()
  # torch's libcudart is linked instead (torch_targets.cmake).
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  enable_language(CUDA)
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    # CMake 3.25.1 supports nvcc's C++ standards only up to 17.
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  target_compile_definitions(flatshard_torch INTERFACE USE_C10D_NCCL=1)
endif()
if(FLATSHARD_WITH_CUDA)
  message(STATUS "flatshard GPUs: ${CMAKE_CUDA_ARCHITECTURES}")
endif()
include(torch_targets)
flatshard_attach_torch(flatshard_fmt flatshard_torch ${FLATSHARD_TORCH_DIR}
                       ${FLATSHARD_WITH_CUDA})
