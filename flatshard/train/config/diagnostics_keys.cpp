#include "flatshard/train/config/diagnostics_keys.h"

#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kTraces{
    "profiling.enabled",
    WHEN(c.profiling.enabled),
    "runs that write a trace"};
constexpr UsedIf kDelays{
    "debug.comm_delay_us",
    WHEN(c.debug.comm_delay_us > 0),
    "runs with delays"};

const ConfigKey kDiagnosticsKeys[] = {
#define KEY(...) KEY_ROW(profiling, __VA_ARGS__)
#include "flatshard/train/config/sections/profiling.def"
#define KEY(...) KEY_ROW(diagnostics, __VA_ARGS__)
#include "flatshard/train/config/sections/diagnostics.def"
#define KEY(...) KEY_ROW(debug, __VA_ARGS__)
#include "flatshard/train/config/sections/debug.def"
};

}  // namespace

KeyTable diagnostics_keys() {
  return {kDiagnosticsKeys};
}

}  // namespace flatshard::config
