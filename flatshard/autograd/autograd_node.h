#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

// The only place for differences between torch versions in autograd.
namespace flatshard {

/// A shared owner of a node of autograd's graph: std::shared_ptr in older
/// versions of torch, c10::intrusive_ptr in newer ones.
using NodePtr = decltype(torch::autograd::Edge::function);

namespace detail {
template <class Ptr>
struct WeakPtrOf;
template <class T>
struct WeakPtrOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <class T>
struct WeakPtrOf<c10::intrusive_ptr<T>> {
  using type = c10::weak_intrusive_ptr<T>;
};
}  // namespace detail

/// Refers to a node without keeping it alive; to none at first.
class WeakNodePtr {
 public:
  WeakNodePtr() = default;
  WeakNodePtr(const NodePtr& node) : node_(node) {}

  bool expired() const { return node_.expired(); }
  /// Returns the node, or null when it is gone.
  NodePtr lock() const { return node_.lock(); }

 private:
  // Not every weak pointer has a default constructor.
  detail::WeakPtrOf<NodePtr>::type node_{NodePtr()};
};

}  // namespace flatshard
