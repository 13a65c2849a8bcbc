# flatshard_attach_torch(<fmt> <torch> <torch folder> <with cuda>)
#   gives two interface targets the headers and libraries of a torch package.
#   Used by the build, and by an installed flatshardConfig.cmake; hence the
#   BUILD_INTERFACE: an export must not carry this machine's paths.
function(flatshard_attach_torch fmt torch dir with_cuda)
  target_include_directories(
    ${fmt} SYSTEM INTERFACE $<BUILD_INTERFACE:${dir}/include>)
  target_include_directories(
    ${torch} SYSTEM INTERFACE
    $<BUILD_INTERFACE:${dir}/include>
    $<BUILD_INTERFACE:${dir}/include/torch/csrc/api/include>)
  target_link_libraries(
    ${torch} INTERFACE $<BUILD_INTERFACE:${dir}/lib/libtorch_cpu.so>
                       $<BUILD_INTERFACE:${dir}/lib/libc10.so>)
  if(NOT with_cuda)
    return()
  endif()
  # The runtime, cuBLASLt and NCCL that torch loads, never a second one.
  cmake_path(GET dir PARENT_PATH site)
  file(GLOB cudart ${site}/nvidia/cu[0-9]*/lib/libcudart.so.*
       ${site}/nvidia/cuda_runtime/lib/libcudart.so.*)
  file(GLOB cublaslt ${site}/nvidia/cu[0-9]*/lib/libcublasLt.so.*
       ${site}/nvidia/cublas/lib/libcublasLt.so.*)
  file(GLOB nccl ${site}/nvidia/nccl/lib/libnccl.so.*)
  file(GLOB headers ${site}/nvidia/nccl/include ${site}/nvidia/cu[0-9]*/include
       ${site}/nvidia/cuda_runtime/include)
  if(FLATSHARD_NVCC)
    # The headers next to nvcc fit it. The wheels' serve without one, and have
    # what an nvcc from the package index lacks: cuBLASLt's.
    cmake_path(GET FLATSHARD_NVCC PARENT_PATH bin)
    cmake_path(GET bin PARENT_PATH toolkit)
    list(PREPEND headers ${toolkit}/include ${toolkit}/include/cccl)
  endif()
  target_include_directories(
    ${torch} SYSTEM INTERFACE "$<BUILD_INTERFACE:${headers}>")
  target_link_libraries(
    ${torch}
    INTERFACE
      # Nothing may refer to these by symbol: they register themselves.
      "$<BUILD_INTERFACE:-Wl,--no-as-needed,${dir}/lib/libtorch_cuda.so,${dir}/lib/libc10_cuda.so,--as-needed>"
      "$<BUILD_INTERFACE:${cudart};${cublaslt};${nccl}>")
endfunction()
