# FLATSHARD_GPUS decides which GPUs the CUDA code is compiled for:
#   native     the GPUs of this machine; without one 90a
#   all        every generation from sm_80 on that this nvcc supports, and PTX of the
#              newest for later ones
#   80;90a     CMake's names: 90a is machine code and PTX, 80-real is machine code
#              alone, 80-virtual is PTX alone, compiled at the first use
# Empty is native where nvidia-smi finds a GPU, else 90a. A variable of the
# environment is taken as well, for `pip install .`, and kept for later configurations.
set(FLATSHARD_GPUS "" CACHE STRING
    "native, all, or architectures such as \"80;90a\"; empty: native, without a GPU 90a")
if(NOT "$ENV{FLATSHARD_GPUS}" STREQUAL "")
  set_property(CACHE FLATSHARD_GPUS PROPERTY VALUE "$ENV{FLATSHARD_GPUS}")
endif()
set(_all_gpus 80 86 89 90a 100a 103a 120)

# Sets <out> to the architectures of this machine's GPUs, none without one.
function(_flatshard_native_gpus out)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE failed)
  set(gpus "")
  if(failed EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${found}")
    foreach(version ${found})
      string(REPLACE "." "" gpu ${version})
      # The names are the same as in `all`.
      if("${gpu}a" IN_LIST _all_gpus)
        string(APPEND gpu a)
      endif()
      list(APPEND gpus ${gpu})
    endforeach()
    list(REMOVE_DUPLICATES gpus)
  endif()
  set(${out} "${gpus}" PARENT_SCOPE)
endfunction()

# Sets <out> to what CMAKE_CUDA_ARCHITECTURES has to be.
function(flatshard_gpus out nvcc)
  string(REPLACE "," ";" chosen "${FLATSHARD_GPUS}")
  execute_process(
    COMMAND ${nvcc} --list-gpu-code OUTPUT_VARIABLE known
    COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9]+" known "${known}")
  if(chosen STREQUAL "" OR chosen STREQUAL "native")
    _flatshard_native_gpus(gpus)
    if(gpus STREQUAL "")
      set(gpus 90a)
    endif()
  elseif(chosen STREQUAL "all")
    set(gpus "")
    foreach(gpu ${_all_gpus})
      string(REGEX MATCH "[0-9]+" number ${gpu})
      if(number IN_LIST known)
        list(APPEND gpus ${gpu})
      else()
        message(STATUS "flatshard GPUs: this nvcc does not know sm_${gpu}")
      endif()
    endforeach()
    list(POP_BACK gpus newest)
    list(TRANSFORM gpus APPEND -real)
    list(APPEND gpus ${newest})
  else()
    set(gpus "${chosen}")
  endif()
  foreach(gpu ${gpus})
    string(REGEX MATCH "^([0-9]+)[af]?(-real|-virtual)?$" matched "${gpu}")
    if(matched STREQUAL "" OR NOT CMAKE_MATCH_1 IN_LIST known
       OR CMAKE_MATCH_1 LESS 80)
      list(JOIN known ", " known)
      message(FATAL_ERROR
        "FLATSHARD_GPUS: expected native, all, or architectures from 80 on such "
        "as \"80;90a\", got '${gpu}' in '${chosen}'. ${nvcc} knows ${known}; with -real "
        "behind a number it is machine code alone, with -virtual PTX alone.")
    endif()
  endforeach()
  set(${out} "${gpus}" PARENT_SCOPE)
endfunction()
