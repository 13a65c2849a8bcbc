# FLATSHARD_COVERAGE=ON: programs count the lines of flatshard/ that they run, for
# `make test COVERAGE=on`.
option(FLATSHARD_COVERAGE "Count the lines that run" OFF)
# A target that counts lines links this into everything built with it, an
# installed library's users too.
function(flatshard_count_lines target)
  if(FLATSHARD_COVERAGE)
    # Threads count too; and with little optimization a line stays a line.
    target_compile_options(
      ${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:--coverage;-fprofile-update=atomic;-O1>)
    target_link_options(${target} INTERFACE --coverage)
  endif()
endfunction()

# add_test(NAME name ...) for tests that may count lines. A process that is killed while
# it writes its counts breaks files to which no other can add its own. So each test has
# a folder of counts, and scripts/coverage adds them up.
function(flatshard_add_test _name name)
  add_test(NAME ${name} ${ARGN})
  if(FLATSHARD_COVERAGE)
    set_tests_properties(
      ${name} PROPERTIES ENVIRONMENT_MODIFICATION
                         GCOV_PREFIX=set:${PROJECT_BINARY_DIR}/counts/${name})
  endif()
endfunction()
