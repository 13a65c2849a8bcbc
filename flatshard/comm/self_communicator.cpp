#include "flatshard/comm/make_communicator.h"

namespace flatshard {
namespace {

class SelfCommunicator : public Communicator {
 public:
  SelfCommunicator(const std::string& name, at::Device device)
      : Communicator(0, 1, name, device) {}

 protected:
  void do_all_gather(Tensors outs, Tensors ins) override { copy(outs, ins); }
  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp /*op*/) override {
    copy(outs, ins);
  }
  void do_all_reduce(at::Tensor /*inout*/, ReduceOp /*op*/) override {}
  void do_broadcast(at::Tensor /*tensor*/, int /*root*/) override {}
  void do_all_to_all(at::Tensor out, at::Tensor in, Parts receives, Parts sends)
      override {
    for (std::size_t i = 0; i < sends.size(); ++i) {
      out.narrow(0, receives.at(i).begin, receives[i].rows)
          .copy_(in.narrow(0, sends[i].begin, sends[i].rows));
    }
  }
  void do_barrier() override {}

 private:
  static void copy(const Tensors& outs, const Tensors& ins) {
    for (std::size_t i = 0; i < outs.size(); ++i) {
      if (outs[i].const_data_ptr() != ins[i].const_data_ptr()) {
        outs[i].view({-1}).copy_(ins[i].view({-1}));
      }
    }
  }
};

}  // namespace

std::shared_ptr<Communicator> make_self_communicator(
    const std::string& name,
    at::Device device) {
  return std::make_shared<SelfCommunicator>(name, device);
}

}  // namespace flatshard
