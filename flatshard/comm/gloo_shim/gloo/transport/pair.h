// Stand-in, see README.md. Not included by torch's header: we end the waits of
// an aborted group with it.
#pragma once

#include <exception>
#include <string>

namespace gloo::transport {

class Pair {
 public:
  virtual ~Pair();
};

namespace tcp {

class Pair : public ::gloo::transport::Pair {
 public:
  ~Pair() override;
  /// Fails all waits on this connection and closes it. The result is passed in
  /// memory, so leaving it out would corrupt the arguments.
  std::exception_ptr signalExceptionExternal(const std::string& message);
};

}  // namespace tcp
}  // namespace gloo::transport
