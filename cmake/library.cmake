# flatshard_library(<folder> [PURE|THREADS] [MODULES] SOURCES ... [CUDA ...] [NO_CUDA ...] DEPS ...)
#   one static library flatshard_<folder>. PURE: includes no torch. CUDA sources
#   are built with CUDA on, NO_CUDA sources (their stubs) otherwise.
# flatshard_program(<name> [PURE] [MODULES] SOURCES ... DEPS ...)
#   one program, at the top of the build folder.
# flatshard_test_library(<name> [THREADS] [MODULES] SOURCES ... DEPS ...
#   [LIBS ...])
#   flatshard_<name>, which several tests use.
# flatshard_test(<name> [PURE|THREADS] [MODULES] SOURCES ... DEPS ... [LIBS ...]
#   [TIMEOUT s] [PROCESSORS n])
#   one GoogleTest program. Its cases are the ctest <name>, labelled quick; those
#   that tests/slow_cases.txt lists are a ctest <name>_slow, or several with a
#   number. With cuda or nccl in its name it is one that does nothing without a
#   GPU, and labelled gpu as well.
# MODULES: takes the precompiled header that has torch's modules.
# With FLATSHARD_SANITIZE only PURE libraries exist, and with thread in it also
# THREADS libraries, which include torch and run their own threads.
set(FLATSHARD_WARNINGS -Wall -Wextra -Wno-unused-parameter
    -Wno-missing-field-initializers -Winvalid-pch)

# GCC collects garbage far too often for files of this size. Fewer collections
# save a tenth of the time, for some 200 MB.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-expand=1000;--param=ggc-min-heapsize=2000000>")
endif()

# Two precompiled headers serve every target that includes torch; see
# cmake/pch.h. They are named in <> and not by their absolute paths, so that
# ccache finds them again from another clone.
function(_flatshard_precompile target header)
  add_library(${target} STATIC cmake/pch.cpp)
  target_link_libraries(${target} PUBLIC flatshard_torch)
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  target_precompile_headers(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:<${header}$<ANGLE-R>>)
  target_compile_options(
    ${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${FLATSHARD_WARNINGS};-fpch-preprocess>)
endfunction()
if(NOT FLATSHARD_SANITIZE)
  _flatshard_precompile(flatshard_pch cmake/pch.h)
  _flatshard_precompile(flatshard_pch_module cmake/pch_module.h)
endif()

# A sanitized build leaves out targets with torch, and targets that depend on
# them.
macro(_flatshard_skip out)
  set(${out} OFF)
  if(FLATSHARD_SANITIZE)
    if(NOT A_PURE AND NOT (A_THREADS AND FLATSHARD_SANITIZE MATCHES thread))
      set(${out} ON)
    endif()
    foreach(dep ${A_DEPS})
      if(NOT TARGET flatshard_${dep})
        set(${out} ON)
      endif()
    endforeach()
  endif()
endmacro()

function(_flatshard_setup target pure)
  # From 3.31 on CMake joins CUDA sources, too. Each kernel's file is compiled
  # separately, so that they compile in parallel.
  set(cuda ${A_SOURCES})
  list(FILTER cuda INCLUDE REGEX "\\.cu$")
  set_source_files_properties(${cuda} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set(pch flatshard_pch)
  if(A_MODULES)
    set(pch flatshard_pch_module)
  endif()
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${FLATSHARD_WARNINGS}>)
  if(pure)
    target_link_libraries(${target} PUBLIC flatshard_fmt Threads::Threads)
  else()
    target_link_libraries(${target} PUBLIC flatshard_torch)
    if(TARGET ${pch})
      target_compile_options(
        ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
      target_precompile_headers(${target} REUSE_FROM ${pch})
    endif()
  endif()
endfunction()

# A program would get -fPIE, and gcc then drops a precompiled header that was
# made with -fPIC. So programs are compiled with -fPIC like the libraries.
function(_flatshard_executable name pure)
  add_executable(${name} ${A_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(
    ${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC>
                    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fPIC>)
  _flatshard_setup(${name} ${pure})
  list(TRANSFORM A_DEPS PREPEND flatshard_)
  target_link_libraries(${name} PRIVATE ${A_DEPS})
endfunction()

function(flatshard_library folder)
  cmake_parse_arguments(
    A "PURE;THREADS;MODULES" "" "SOURCES;CUDA;NO_CUDA;DEPS" ${ARGN})
  _flatshard_skip(skip)
  if(skip)
    return()
  endif()
  set(target flatshard_${folder})
  if(FLATSHARD_WITH_CUDA)
    list(APPEND A_SOURCES ${A_CUDA})
  else()
    list(APPEND A_SOURCES ${A_NO_CUDA})
  endif()
  add_library(${target} STATIC ${A_SOURCES})
  target_include_directories(
    ${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                     $<INSTALL_INTERFACE:include>)
  _flatshard_setup(${target} ${A_PURE})
  flatshard_count_lines(${target})
  list(TRANSFORM A_DEPS PREPEND flatshard_)
  target_link_libraries(${target} PUBLIC ${A_DEPS})
  set_property(GLOBAL APPEND PROPERTY FLATSHARD_LIBRARIES ${target})
endfunction()

function(flatshard_program name)
  cmake_parse_arguments(A "PURE;MODULES" "" "SOURCES;DEPS" ${ARGN})
  _flatshard_skip(skip)
  if(skip)
    return()
  endif()
  _flatshard_executable(${name} ${A_PURE})
  set_target_properties(
    ${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
endfunction()

function(flatshard_test_library name)
  cmake_parse_arguments(A "THREADS;MODULES" "" "SOURCES;DEPS;LIBS" ${ARGN})
  _flatshard_skip(skip)
  if(skip)
    return()
  endif()
  add_library(flatshard_${name} STATIC ${A_SOURCES})
  _flatshard_setup(flatshard_${name} "")
  target_include_directories(flatshard_${name} PUBLIC ${PROJECT_SOURCE_DIR})
  list(TRANSFORM A_DEPS PREPEND flatshard_)
  target_link_libraries(
    flatshard_${name} PUBLIC ${A_DEPS} ${A_LIBS} PRIVATE GTest::gtest)
endfunction()

function(flatshard_test name)
  cmake_parse_arguments(
    A "PURE;THREADS;MODULES" "TIMEOUT;PROCESSORS" "SOURCES;DEPS;LIBS" ${ARGN})
  _flatshard_skip(skip)
  if(skip)
    return()
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  # How many cores it keeps from others: more than 1 where it watches the clock.
  if(NOT A_PROCESSORS)
    set(A_PROCESSORS 1)
  endif()
  _flatshard_executable(${name} ${A_PURE})
  # Less to wait for when they are built, hardly more when they run.
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
  target_link_libraries(
    ${name} PRIVATE ${A_LIBS} GTest::gmock GTest::gtest_main)
  set_target_properties(
    ${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  set(slow "")
  if(NOT FLATSHARD_SANITIZE)
    set(slow ${FLATSHARD_SLOW_CASES})
  endif()
  list(FILTER slow INCLUDE REGEX "^${name} ")
  set(cases "")
  set(seconds 0)
  foreach(line ${slow})
    string(REPLACE " " ";" line ${line})
    list(GET line 1 case)
    list(GET line 2 time)
    list(APPEND cases ${case})
    math(EXPR seconds "${seconds} + ${time}")
  endforeach()
  list(JOIN cases ":" cases)
  _flatshard_ctest(${name} ${name} ${A_TIMEOUT})
  set(labels quick)
  if(name MATCHES "cuda|nccl")
    list(APPEND labels gpu)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${labels}")
  if(cases)
    set_property(
      TEST ${name} APPEND PROPERTY ENVIRONMENT "GTEST_FILTER=-${cases}")
    # Parts of some 40 seconds, so that workers share a long program.
    math(EXPR parts "1 + ${seconds} / 40")
    math(EXPR seconds "${seconds} / ${parts}")
    foreach(part RANGE 1 ${parts})
      set(test ${name}_slow)
      if(part GREATER 1)
        string(APPEND test _${part})
      endif()
      math(EXPR index "${part} - 1")
      _flatshard_ctest(${test} ${name} ${A_TIMEOUT})
      set_property(
        TEST ${test} APPEND PROPERTY ENVIRONMENT "GTEST_FILTER=${cases}"
        "GTEST_TOTAL_SHARDS=${parts}" "GTEST_SHARD_INDEX=${index}")
      # The longest begin first.
      set_tests_properties(${test} PROPERTIES COST ${seconds})
    endforeach()
  endif()
endfunction()

# The times of the cases are left in build/reports, for scripts/slow_cases.
function(_flatshard_ctest name program timeout)
  flatshard_add_test(NAME ${name} COMMAND ${program})
  set_tests_properties(
    ${name} PROPERTIES TIMEOUT ${timeout} PROCESSORS ${A_PROCESSORS} ENVIRONMENT
    "OMP_NUM_THREADS=1;GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/reports/${name}.xml")
endfunction()

# "<program> <case> <seconds>", for pytest "python <file>::<test> <seconds>".
set(_slow_cases ${PROJECT_SOURCE_DIR}/tests/slow_cases.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_slow_cases})
if(FLATSHARD_TESTS)  # a source distribution has none
  file(STRINGS ${_slow_cases} FLATSHARD_SLOW_CASES REGEX "^[^#]")
endif()
