#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace flatshard {

/// Returns a conversation that a user begins, as a JSON row of messages.
/// @param system  the text of a message in front of it; empty: none.
std::string chat_row(const std::string& system, const std::string& user);

/// Reads conversations as JSON rows from a file: a list of messages, one object
/// with `messages`, or a line with such an object for each conversation.
/// @param system  is put in front of those that begin with no such message.
/// @throws Error{io} for a file that cannot be read, Error{format} for one with
/// anything else.
std::vector<std::string> read_chat_rows(
    const std::filesystem::path& path,
    const std::string& system);

}  // namespace flatshard
