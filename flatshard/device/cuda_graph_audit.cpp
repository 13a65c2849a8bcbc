#include "flatshard/device/cuda_graph_audit.h"

#include "flatshard/core/error.h"
#include "flatshard/device/cuda_driver.h"

#include <cuda.h>

namespace flatshard::detail {
namespace {

void check(cudaError_t status, const char* what) {
  FLATSHARD_CHECK(
      status == cudaSuccess,
      cuda,
      "audit of a CUDA graph: {}: {}",
      what,
      cudaGetErrorString(status));
}

template <class Function>
Function* driver_function(const char* name, unsigned version) {
  auto* const function = find_driver_function<Function*>(name, version);
  FLATSHARD_CHECK(
      function != nullptr,
      cuda,
      "the audit of CUDA graphs requires a driver of CUDA 12.4 or newer ({}); "
      "turn GraphOptions::audit off",
      name);
  return function;
}

struct Driver {
  decltype(cuGraphKernelNodeGetParams)* kernel_params =
      driver_function<decltype(cuGraphKernelNodeGetParams)>(
          "cuGraphKernelNodeGetParams",
          12000);
  decltype(cuFuncGetParamInfo)* function_param =
      driver_function<decltype(cuFuncGetParamInfo)>(
          "cuFuncGetParamInfo",
          12040);
  decltype(cuKernelGetParamInfo)* kernel_param =
      driver_function<decltype(cuKernelGetParamInfo)>(
          "cuKernelGetParamInfo",
          12040);
  decltype(cuFuncGetName)* function_name =
      driver_function<decltype(cuFuncGetName)>("cuFuncGetName", 12030);
  decltype(cuKernelGetName)* kernel_name =
      driver_function<decltype(cuKernelGetName)>("cuKernelGetName", 12030);
};

class Auditor {
 public:
  explicit Auditor(const GraphMemory& memory) : memory_(memory) {}

  void look_at(cudaGraph_t graph) {
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
    std::vector<cudaGraphNode_t> nodes(count);
    check(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      check(cudaGraphNodeGetType(node, &type), "type of a node");
      switch (type) {
        case cudaGraphNodeTypeKernel:
          look_at_kernel(node);
          break;
        case cudaGraphNodeTypeMemcpy:
          look_at_copy(node);
          break;
        case cudaGraphNodeTypeMemset:
          look_at_fill(node);
          break;
        case cudaGraphNodeTypeGraph: {
          cudaGraph_t inner = nullptr;
          check(cudaGraphChildGraphNodeGetGraph(node, &inner), "inner graph");
          look_at(inner);
          break;
        }
        default:  // events and the like have no memory
          break;
      }
    }
  }

  GraphAudit take() { return std::move(audit_); }

 private:
  void look_at_kernel(cudaGraphNode_t node) {
    ++audit_.nodes;
    CUDA_KERNEL_NODE_PARAMS params{};
    const CUresult status = driver_.kernel_params(node, &params);
    FLATSHARD_CHECK(
        status == CUDA_SUCCESS,
        cuda,
        "audit of a CUDA graph: parameters of a kernel: driver's error {}",
        static_cast<int>(status));
    const char* text = nullptr;
    const CUresult named = params.func != nullptr
                               ? driver_.function_name(&text, params.func)
                               : driver_.kernel_name(&text, params.kern);
    const std::string name =
        named == CUDA_SUCCESS && text != nullptr ? text : "a kernel";
    if (params.kernelParams == nullptr) {
      look_at_packed(name, params.extra);
      return;
    }
    std::size_t first = 0;
    for (std::size_t i = 0;; ++i) {
      std::size_t offset = 0;
      std::size_t nbytes = 0;
      const CUresult found =
          params.func != nullptr
              ? driver_.function_param(params.func, i, &offset, &nbytes)
              : driver_.kernel_param(params.kern, i, &offset, &nbytes);
      if (found != CUDA_SUCCESS) {
        break;  // after the last one
      }
      look_at_words(name, first, words_of(params.kernelParams[i], nbytes));
      first += nbytes / sizeof(std::uint64_t);
    }
  }

  // All parameters in one buffer.
  void look_at_packed(const std::string& name, void** extra) {
    const void* buffer = nullptr;
    std::size_t nbytes = 0;
    for (; extra != nullptr && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
      if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
        buffer = extra[1];
      } else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) {
        nbytes = *static_cast<const std::size_t*>(extra[1]);
      }
    }
    if (buffer != nullptr) {
      look_at_words(name, 0, words_of(buffer, nbytes));
    }
  }

  void look_at_copy(cudaGraphNode_t node) {
    ++audit_.nodes;
    cudaMemcpy3DParms params{};
    // A copy that stream capture recorded in another form has none.
    if (cudaGraphMemcpyNodeGetParams(node, &params) != cudaSuccess) {
      (void)cudaGetLastError();
      return;
    }
    look_at_words(
        "a copy",
        0,
        {reinterpret_cast<std::uint64_t>(params.dstPtr.ptr),
         reinterpret_cast<std::uint64_t>(params.srcPtr.ptr)});
  }

  void look_at_fill(cudaGraphNode_t node) {
    ++audit_.nodes;
    cudaMemsetParams params{};
    check(cudaGraphMemsetNodeGetParams(node, &params), "a fill");
    look_at_words("a fill", 0, {reinterpret_cast<std::uint64_t>(params.dst)});
  }

  void look_at_words(
      const std::string& name,
      std::size_t first,
      const std::vector<std::uint64_t>& words) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      const GraphMemory::Kind kind = memory_.kind(words[i]);
      audit_.addresses += kind != GraphMemory::Kind::no_address ? 1 : 0;
      if (kind == GraphMemory::Kind::stray) {
        audit_.strays.push_back(describe_stray(name, first + i, words[i]));
      }
    }
  }

  const GraphMemory& memory_;
  Driver driver_;
  GraphAudit audit_;
};

}  // namespace

GraphAudit audit_graph(cudaGraph_t graph, const GraphMemory& memory) {
  Auditor auditor(memory);
  auditor.look_at(graph);
  return auditor.take();
}

}  // namespace flatshard::detail
