# Compiles through ccache when it is installed. The precompiled torch header
# needs ccache's sloppiness for PCH and time macros.
find_program(FLATSHARD_CCACHE ccache)
if(FLATSHARD_CCACHE)
  set(FLATSHARD_LAUNCHER
      ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${FLATSHARD_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${FLATSHARD_LAUNCHER})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${FLATSHARD_LAUNCHER})
endif()
