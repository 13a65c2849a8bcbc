# libtorch from the Python package, without find_package(Torch): that one
# demands a CUDA toolkit whenever the wheel was built with CUDA.
#
# Targets: flatshard_fmt (torch's bundled fmt, header-only, for the layers
# without torch) and flatshard_torch (headers, libraries, C++ ABI).
set(_default_python ${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python)
if(SKBUILD)
  set(_default_python ${Python_EXECUTABLE})  # pip's
endif()
set(FLATSHARD_PYTHON "${_default_python}"
    CACHE FILEPATH "Python whose torch package is used")
if(SKBUILD AND NOT EXISTS "${FLATSHARD_TORCH_DIR}/version.py")
  # The environment of an earlier isolated build in this folder is gone.
  unset(FLATSHARD_TORCH_DIR CACHE)
endif()
if(NOT FLATSHARD_TORCH_DIR)
  execute_process(
    COMMAND ${FLATSHARD_PYTHON} -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE _torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE _torch_rc)
  if(NOT _torch_rc EQUAL 0)
    message(FATAL_ERROR
      "expected a Python with torch at FLATSHARD_PYTHON, got "
      "'${FLATSHARD_PYTHON}'. Run 'make build', which creates .venv, or set "
      "-DFLATSHARD_PYTHON=... or -DFLATSHARD_TORCH_DIR=...")
  endif()
  set(FLATSHARD_TORCH_DIR ${_torch_dir} CACHE PATH "the torch package folder")
endif()

file(STRINGS ${FLATSHARD_TORCH_DIR}/version.py _torch_version_py)
string(REGEX MATCH "__version__ = '([^']+)'" _m "${_torch_version_py}")
set(FLATSHARD_TORCH_VERSION ${CMAKE_MATCH_1})
string(REGEX MATCH "cuda: Optional\\[str\\] = '([0-9.]+)" _m
       "${_torch_version_py}")
set(FLATSHARD_TORCH_CUDA "${CMAKE_MATCH_1}")
string(REGEX MATCH "\"torch>=([0-9.]+),<([0-9.]+)\"" _m "${_pyproject}")
if(FLATSHARD_TORCH_VERSION VERSION_LESS CMAKE_MATCH_1
   OR FLATSHARD_TORCH_VERSION VERSION_GREATER_EQUAL CMAKE_MATCH_2)
  message(FATAL_ERROR
    "expected torch >= ${CMAKE_MATCH_1} and < ${CMAKE_MATCH_2}, got "
    "${FLATSHARD_TORCH_VERSION} at ${FLATSHARD_TORCH_DIR}. Others have not been "
    "tried: install one of these, or set -DFLATSHARD_PYTHON to a Python that has it.")
endif()
message(STATUS "torch ${FLATSHARD_TORCH_VERSION} at ${FLATSHARD_TORCH_DIR}")

find_package(Threads REQUIRED)
add_library(flatshard_fmt STATIC cmake/fmt_format.cpp)
target_include_directories(
  flatshard_fmt SYSTEM PRIVATE ${FLATSHARD_TORCH_DIR}/include)
add_library(flatshard_torch INTERFACE)
target_compile_definitions(
  flatshard_torch INTERFACE USE_C10D_GLOO=1 USE_DISTRIBUTED=1)
target_link_libraries(
  flatshard_torch INTERFACE flatshard_fmt Threads::Threads)
