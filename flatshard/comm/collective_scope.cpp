#include "flatshard/comm/collective_scope.h"

namespace flatshard {
namespace {

thread_local const CollectiveScope* current_scope = nullptr;

}  // namespace

CollectiveScope::CollectiveScope(std::int64_t step, std::string_view unit)
    : outer_(current_scope), step_(step), unit_(unit) {
  current_scope = this;
}

CollectiveScope::~CollectiveScope() {
  current_scope = outer_;
}

const CollectiveScope* CollectiveScope::current() {
  return current_scope;
}

}  // namespace flatshard
