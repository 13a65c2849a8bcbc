# Compiles through ccache when it is installed. ccache asks for this sloppiness
# around a precompiled header. The base folder makes paths relative, so that
# several build folders and clones share one cache.
find_program(FLATSHARD_CCACHE ccache)
if(FLATSHARD_CCACHE)
  set(FLATSHARD_LAUNCHER
      ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}
      ${FLATSHARD_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${FLATSHARD_LAUNCHER})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${FLATSHARD_LAUNCHER})
endif()
