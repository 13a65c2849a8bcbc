#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

namespace flatshard {

// Standard output and standard error of a program that outlives its readers: a
// pipe whose reader has ended, a terminal that was closed.

/// Opens /dev/null as each of the descriptors 0, 1 and 2 that is closed.
/// Otherwise the next file to be opened gets its number, and printed text ends
/// up in that file.
void open_standard_streams();

/// Keeps output in a file once its reader is gone. Ignores SIGPIPE from here
/// on. Such output is dropped without this call.
///
/// @param log    appended to, made when it is first needed.
/// @param claim  called by the process that starts to write there: true for the
///   one that explains in the file why it does. Empty: always true.
void keep_output_in(
    std::filesystem::path log,
    std::function<bool()> claim = {});

/// Writes all of `text` to `fd` (1 or 2), from any thread, without
/// interleaving. Never throws and never ends the program: when `fd` has no
/// reader any more, it becomes the log of `keep_output_in`. Text that a full
/// disk has no room for is dropped.
void write_output(int fd, std::string_view text) noexcept;

}  // namespace flatshard
