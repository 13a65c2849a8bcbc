#include "tests/programs/program.h"

#include <random>

namespace flatshard::testing {
namespace {

using nlohmann::json;

class Generator {
 public:
  Generator(std::uint64_t seed, int world) : random_(seed), world_(world) {}

  json program(std::uint64_t seed, int num_models) {
    json p{{"seed", seed}};
    several_ = num_models > 1;
    shard(p);
    num_ops_ = 0;
    p["model"] = node(0);
    p["model"]["unit"] = true;
    for (int i = 1; i < num_models; ++i) {
      num_nodes_ = 0;
      p["others"].push_back(node(0));
      p["others"].back()["unit"] = true;
    }
    if (num_models > 1) {
      p["link"] =
          one_of(std::vector<std::string>{"chain", "back", "detached", "sum"});
    }
    p["steps"] = json::array();
    for (int i = between(2, 4); i > 0; --i) {
      p["steps"].push_back(step());
    }
    if (chance(50)) {
      p["offload"] = true;
    }
    return p;
  }

 private:
  // Not std::uniform_int_distribution: its numbers differ between libraries.
  int between(int low, int high) {
    return low + static_cast<int>(
                     random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return between(0, 99) < percent; }
  template <class T>
  const T& one_of(const std::vector<T>& values) {
    return values[static_cast<std::size_t>(
        between(0, static_cast<int>(values.size()) - 1))];
  }

  void shard(json& p) {
    using Names = std::vector<std::string>;
    if (world_ == 2 && chance(25)) {
      p["mesh"] = chance(50) ? json{2, 1} : json{1, 2};
      p["strategy"] = one_of(
          Names{"hsdp", "hfsdp", "hsdp_zero1", "hsdp_zero2", "zero3", "zero1"});
    } else {
      p["mesh"] = json::array({world_});
      p["strategy"] =
          one_of(Names{"zero0", "zero1", "zero2", "zero3", "zero3"});
    }
    p["prefetch"] = between(0, 3);
    p["reshard"] = chance(75);
    p["granularity"] = one_of(Names{"element", "element", "row", "tensor"});
    p["delay_us"] = one_of(std::vector<int>{0, 30, 200});
    if (world_ == 4 && p["strategy"] == "zero3") {
      p["post_forward_ranks"] = chance(50) ? 2 : 0;
    }
  }

  json node(int depth) {
    json children = json::array();
    const int num_children = depth >= 3 ? 0 : between(depth == 0 ? 1 : 0, 3);
    for (int i = 0; i < num_children && num_nodes_ < 9; ++i) {
      ++num_nodes_;
      children.push_back(node(depth + 1));
    }
    json ops = json::array();
    for (int i = between(1, 3); i > 0; --i) {
      ops.push_back(own_op());
    }
    // Most children run once. Each may also run in unusual ways.
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (chance(85)) {
        ops.insert(
            ops.begin() + between(0, static_cast<int>(ops.size())),
            child_op(i, children.size()));
      }
    }
    if (children.size() > 0 && chance(30)) {
      ops.insert(
          ops.begin() + between(0, static_cast<int>(ops.size())),
          child_op(0, children.size()));
    }
    num_ops_ += static_cast<int>(ops.size());
    return {{"unit", chance(65)}, {"ops", ops}, {"children", children}};
  }

  json own_op() {
    static const std::vector<std::string> kinds{
        "linear",
        "linear",
        "linear",
        "linear",
        "gain",
        "gain",
        "scalar",
        "empty",
        "odd",
        "unused",
        "twice",
        "lora",
        "tied",
        "view",
        "emit",
        "absorb",
        "sometimes",
        "shift_input"};
    json op{{"op", one_of(kinds)}};
    if (chance(15)) {
      op["frozen"] = true;
    }
    if (op["op"] == "tied") {
      op["to"] = between(0, 9);
    }
    return op;
  }

  json child_op(std::size_t child, std::size_t num_children) {
    static const std::vector<std::string> kinds{
        "child",
        "child",
        "child",
        "child",
        "child",
        "child",
        "branch",
        "child_twice",
        "rotate",
        "checkpoint",
        "checkpoint",
        "inplace_output",
        "detached",
        "dead",
        "no_grad",
        "child_sometimes"};
    std::string kind = one_of(kinds);
    if (several_ && (kind == "dead" || kind == "detached")) {
      kind = "child";
    }
    return {
        {"op", kind},
        {"a", child},
        {"b", between(0, static_cast<int>(num_children) - 1)}};
  }

  json step() {
    static const std::vector<std::string> last{
        "fb",
        "fb",
        "fb",
        "fb_x",
        "ffb",
        "ffbb",
        "ffbb_swapped",
        "retain",
        "leaf_input",
        "fb_eval_between"};
    static const std::vector<std::string> other{
        "eval",
        "drop",
        "grad_inputs",
        "fail_forward",
        "fail_backward"};
    json micro = json::array();
    for (int i = between(0, 2); i > 0; --i) {
      std::string kind = chance(55) ? one_of(last) : one_of(other);
      if (several_ && kind.starts_with("fail")) {
        kind = "fb";
      }
      if (kind.starts_with("fail")) {
        kind += ":" + std::to_string(between(0, num_ops_ - 1));
      }
      micro.push_back(kind);
    }
    micro.push_back(one_of(last));
    for (json& kind : micro) {
      if (several_ && kind == "fb_x") {
        kind = "fb";
      }
    }
    return {{"no_sync", chance(20)}, {"micro", micro}};
  }

  std::mt19937_64 random_;
  int world_;
  int num_ops_ = 0;
  int num_nodes_ = 0;
  /// Models. Every backward reaches all of them and ends well: nothing reports
  /// to a model that it does not reach, as with forwards whose loss is dropped.
  bool several_ = false;
};

// Appends to `out` copies of `program`, each with one simplification inside the
// `node` at `path`.
void cut_nodes(
    const json& program,
    const json::json_pointer& path,
    std::vector<json>& out) {
  const json& node = program.at(path);
  const auto without = [&](const json::json_pointer& where, std::size_t i) {
    json smaller = program;
    smaller.at(where).erase(i);
    out.push_back(std::move(smaller));
  };
  for (std::size_t i = 0; i < node.at("children").size(); ++i) {
    without(path / "children", i);
  }
  for (std::size_t i = 0; i < node.at("ops").size(); ++i) {
    without(path / "ops", i);
  }
  for (std::size_t i = 0; i < node.at("ops").size(); ++i) {
    const json& op = node.at("ops")[i];
    const std::string kind = op.at("op");
    const bool calls_child = op.contains("a");
    const std::string simple = calls_child ? "child" : "linear";
    if (kind != simple) {
      json smaller = program;
      smaller.at(path / "ops" / i)["op"] = simple;
      out.push_back(std::move(smaller));
    }
    if (op.contains("frozen")) {
      json smaller = program;
      smaller.at(path / "ops" / i).erase("frozen");
      out.push_back(std::move(smaller));
    }
  }
  if (node.value("unit", false) && !path.parent_pointer().empty()) {
    json smaller = program;
    smaller.at(path)["unit"] = false;
    out.push_back(std::move(smaller));
  }
  for (std::size_t i = 0; i < node.at("children").size(); ++i) {
    cut_nodes(program, path / "children" / i, out);
  }
}

}  // namespace

nlohmann::json random_program(std::uint64_t seed, int world, int num_models) {
  return Generator(seed, world).program(seed, num_models);
}

std::vector<nlohmann::json> smaller_programs(const nlohmann::json& program) {
  std::vector<json> out;
  const json& steps = program.at("steps");
  for (std::size_t s = 0; s < steps.size() && steps.size() > 1; ++s) {
    json smaller = program;
    smaller["steps"].erase(s);
    out.push_back(std::move(smaller));
  }
  const json others = program.value("others", json::array());
  for (std::size_t i = 0; i < others.size(); ++i) {
    json smaller = program;
    smaller["others"].erase(i);
    out.push_back(std::move(smaller));
  }
  cut_nodes(program, json::json_pointer("/model"), out);
  for (std::size_t i = 0; i < others.size(); ++i) {
    cut_nodes(program, json::json_pointer("/others") / i, out);
  }
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const json& micro = steps[s].at("micro");
    for (std::size_t m = 0; m < micro.size(); ++m) {
      if (micro.size() > 1) {
        json smaller = program;
        smaller["steps"][s]["micro"].erase(m);
        out.push_back(std::move(smaller));
      }
      if (micro[m] != "fb") {
        json smaller = program;
        smaller["steps"][s]["micro"][m] = "fb";
        out.push_back(std::move(smaller));
      }
    }
    if (steps[s].value("no_sync", false)) {
      json smaller = program;
      smaller["steps"][s]["no_sync"] = false;
      out.push_back(std::move(smaller));
    }
  }
  const json plain{
      {"prefetch", 0},
      {"reshard", true},
      {"granularity", "element"},
      {"delay_us", 0}};
  for (const auto& [key, value] : plain.items()) {
    if (program.at(key) != value) {
      json smaller = program;
      smaller[key] = value;
      out.push_back(std::move(smaller));
    }
  }
  for (const char* key : {"post_forward_ranks", "offload"}) {
    if (program.contains(key)) {
      json smaller = program;
      smaller.erase(key);
      out.push_back(std::move(smaller));
    }
  }
  return out;
}

}  // namespace flatshard::testing
