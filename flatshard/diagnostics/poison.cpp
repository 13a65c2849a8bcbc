#include "flatshard/diagnostics/poison.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/rounding.h"

#include <ATen/ATen.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {
namespace {

constexpr int kNanByte = 0xFF;  // all bits set is a NaN in every IEEE type

struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::string text;  ///< made beforehand: the handler cannot allocate
};

/// A parameter for which poisoned memory is made.
struct PoisonSpec {
  std::string unit;
  std::string name;
  std::size_t nbytes = 0;
};

/// Address space of one runtime's resharded parameters.
struct Region {
  void* base = nullptr;
  std::size_t nbytes = 0;
  std::vector<Range> ranges;
  int index = -1;  ///< in g_regions

  ~Region();
};

// The state that the handler may read. It consists of atomics and memory that
// does not move.
std::array<std::atomic<const Region*>, 256> g_regions{};
std::atomic<std::int64_t> g_step{0};
std::atomic_flag g_said = ATOMIC_FLAG_INIT;
struct sigaction g_previous {};

Region::~Region() {
  if (index >= 0) {
    g_regions[index] = nullptr;
  }
  if (base != nullptr) {
    ::munmap(base, nbytes);
  }
}

void write_text(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
    if (n <= 0 && errno != EINTR) {
      return;
    }
    text.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
  }
}

void write_number(std::int64_t number) {
  char digits[20];
  std::size_t at = sizeof(digits);
  do {
    digits[--at] = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number > 0 && at > 0);
  write_text({digits + at, sizeof(digits) - at});
}

void say_who(std::uintptr_t address) {
  for (const auto& slot : g_regions) {
    const Region* region = slot.load();
    if (region == nullptr) {
      continue;
    }
    for (const Range& range : region->ranges) {
      if (address >= range.begin && address < range.end) {
        if (!g_said.test_and_set()) {
          write_text(range.text);
          if (g_step > 0) {
            write_text(" (step ");
            write_number(g_step);
            write_text(")");
          }
          write_text("\n");
        }
        return;
      }
    }
  }
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  say_who(reinterpret_cast<std::uintptr_t>(info->si_addr));
  errno = error;
  if ((g_previous.sa_flags & SA_SIGINFO) != 0) {
    g_previous.sa_sigaction(signal, info, context);
    return;
  }
  if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(signal);
    return;
  }
  // The faulting instruction runs again and ends the process in the usual way.
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  ::sigaction(signal, &usual, nullptr);
  if (info->si_code <= 0) {
    ::raise(signal);  // somebody sent it: nothing would fault again
  }
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction now {};
    now.sa_sigaction = on_fault;
    now.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&now.sa_mask);
    FLATSHARD_CHECK(
        ::sigaction(SIGSEGV, &now, &g_previous) == 0,
        internal,
        "sigaction: {}",
        std::strerror(errno));
  });
}

void publish(Region& region) {
  for (std::size_t i = 0; i < g_regions.size(); ++i) {
    const Region* none = nullptr;
    if (g_regions[i].compare_exchange_strong(none, &region)) {
      region.index = static_cast<int>(i);
      return;
    }
  }
  log_warning(
      "more than {} runtimes with poisoned memory; this one's parameters will "
      "not be named",
      g_regions.size());
}

std::vector<std::shared_ptr<void>> protected_ranges(
    const std::string& who,
    const std::vector<PoisonSpec>& parameters) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto region = std::make_shared<Region>();
  std::vector<std::size_t> offsets;
  for (const PoisonSpec& p : parameters) {
    offsets.push_back(region->nbytes);
    region->nbytes += round_up(std::max<std::size_t>(p.nbytes, 1), page);
  }
  void* base = ::mmap(
      nullptr,
      region->nbytes,
      PROT_NONE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
      -1,
      0);
  FLATSHARD_CHECK(
      base != MAP_FAILED,
      memory,
      "cannot reserve {} bytes of address space for poisoned parameters: {}; "
      "raise the limit (ulimit -v) or switch poison off",
      region->nbytes,
      std::strerror(errno));
  region->base = base;
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  std::vector<std::shared_ptr<void>> result;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::size_t end =
        i + 1 < offsets.size() ? offsets[i + 1] : region->nbytes;
    region->ranges.push_back(
        {begin + offsets[i],
         begin + end,
         fmt::format(
             "[{}] usage error: parameter {} was read or written while unit {} "
             "is resharded; use it only inside the forward of its unit, called "
             "through its holder, or use Runtime::groups()",
             who,
             parameters[i].name,
             parameters[i].unit)});
    result.emplace_back(region, static_cast<char*>(base) + offsets[i]);
  }
  install_handler();
  publish(*region);
  return result;
}

std::vector<std::shared_ptr<void>> nan_block(
    at::Device device,
    const std::vector<PoisonSpec>& parameters) {
  std::size_t largest = 1;
  for (const PoisonSpec& p : parameters) {
    largest = std::max(largest, p.nbytes);
  }
  const auto block = std::make_shared<at::Tensor>(at::full(
      {static_cast<std::int64_t>(largest)},
      kNanByte,
      at::TensorOptions().dtype(at::kByte).device(device)));
  return {parameters.size(), std::shared_ptr<void>(block, block->data_ptr())};
}

/// Returns addresses for resharded parameters, one per spec. Each shared
/// pointer keeps its memory alive.
/// @param who  prefix of the message, e.g. "rank 3/8".
std::vector<std::shared_ptr<void>> make_poison(
    at::Device device,
    const std::string& who,
    const std::vector<PoisonSpec>& parameters) {
  if (parameters.empty()) {
    return {};
  }
  return device.is_cpu() ? protected_ranges(who, parameters)
                         : nan_block(device, parameters);
}

}  // namespace

void fill_with_nan(const SlotView& slot) {
  const at::NoGradGuard no_grad;
  slot.tensor(0, {slot.nbytes}, at::kByte).fill_(kNanByte);
}

void Poison::install(const std::shared_ptr<Runtime>& runtime) {
  std::vector<PoisonSpec> specs;
  for (const auto& unit : runtime->units()) {
    for (const UnitParameter& p : unit->parameters()) {
      specs.push_back({unit->name(), p.name, p.storage.nbytes()});
    }
  }
  const Mesh& mesh = *runtime->mesh();
  const auto memory = make_poison(
      mesh.device(),
      fmt::format("rank {}/{}", mesh.rank(), mesh.size()),
      specs);
  auto next = memory.begin();
  for (const auto& unit : runtime->units()) {
    for (UnitParameter& p : unit->parameters()) {
      p.storage.set_released_memory(*next++);
    }
    unit->pointers().clear();
  }
  runtime->add_observer(std::make_shared<Poison>());
}

std::int64_t Poison::nbytes(const Runtime& runtime) {
  std::size_t largest = 0;
  if (runtime.core().options.debug.poison &&
      runtime.mesh()->device().is_cuda()) {
    for (const auto& unit : runtime.units()) {
      for (const UnitParameter& p : unit->parameters()) {
        largest = std::max(largest, p.storage.nbytes());
      }
    }
  }
  return static_cast<std::int64_t>(largest);
}

void Poison::step_named(std::int64_t step) {
  g_step = step;
}

}  // namespace flatshard
