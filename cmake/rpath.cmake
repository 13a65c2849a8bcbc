# Where the installed program looks for torch and NVIDIA's libraries: the folders of
# this build's. INSTALL_RPATH_USE_LINK_PATH leaves out what is below the checkout, as
# .venv is. wheel.cmake makes them relative to the package.
cmake_path(GET FLATSHARD_TORCH_DIR PARENT_PATH FLATSHARD_SITE)
set(FLATSHARD_LIBRARY_FOLDERS torch/lib)
if(FLATSHARD_WITH_CUDA)
  file(GLOB _nvidia RELATIVE ${FLATSHARD_SITE}
       ${FLATSHARD_SITE}/nvidia/cu[0-9]*/lib
       ${FLATSHARD_SITE}/nvidia/cuda_runtime/lib
       ${FLATSHARD_SITE}/nvidia/cublas/lib ${FLATSHARD_SITE}/nvidia/nccl/lib)
  list(APPEND FLATSHARD_LIBRARY_FOLDERS ${_nvidia})
endif()
if(TARGET flatshard)
  set(_rpath ${FLATSHARD_LIBRARY_FOLDERS})
  list(TRANSFORM _rpath PREPEND ${FLATSHARD_SITE}/)
  set_target_properties(flatshard PROPERTIES INSTALL_RPATH "${_rpath}")
endif()
