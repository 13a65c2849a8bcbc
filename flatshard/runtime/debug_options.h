#pragma once

namespace flatshard {

/// Checks of a Runtime that cost time and are off by default; off, they cost
/// nothing. docs/guides/diagnostics.md lists the errors that each finds.
struct DebugOptions {
  /// Resharded parameters point at memory that cannot be read (CPU: the process
  /// ends and names the parameter) or contains NaN (GPU); freed slots are
  /// filled with NaN.
  bool poison = false;
  /// The life cycle of modules is checked: a submodule called without its unit,
  /// a forward without its backward, ranks that run units in different orders,
  /// and so on. The start of every forward and Runtime::finish_step are then
  /// collective and block the host.
  bool strict = false;
};

}  // namespace flatshard
