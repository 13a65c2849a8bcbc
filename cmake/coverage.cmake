# FLATSHARD_COVERAGE=ON: programs count the lines they run, for scripts/coverage.
option(FLATSHARD_COVERAGE "Count the lines that run" OFF)
if(FLATSHARD_COVERAGE)
  # Threads count too; and with little optimization a line stays a line.
  add_compile_options(--coverage -fprofile-update=atomic -O1)
  add_link_options(--coverage)
endif()
