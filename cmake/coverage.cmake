# FLATSHARD_COVERAGE=ON: programs count the lines of flatshard/ that they run, for
# `make test COVERAGE=on`.
option(FLATSHARD_COVERAGE "Count the lines that run" OFF)
# What counts links whatever is built with it, an installed library's users too.
function(flatshard_count_lines target)
  if(FLATSHARD_COVERAGE)
    # Threads count too; and with little optimization a line stays a line.
    target_compile_options(
      ${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:--coverage;-fprofile-update=atomic;-O1>)
    target_link_options(${target} INTERFACE --coverage)
  endif()
endfunction()
