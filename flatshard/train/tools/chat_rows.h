#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace flatshard {

/// Additions to conversations.
struct ChatAdditions {
  /// The text of a system message, prepended to conversations without one;
  /// empty: none.
  std::string system;
  /// Variables of the chat template (a row's variables override them): JSON
  /// text of an object; empty: none.
  std::string template_kwargs;
};

/// Returns a conversation that a user starts, as a JSON row of messages.
/// @throws Error{config} naming --chat-template-kwargs.
std::string chat_row(const ChatAdditions& additions, const std::string& user);

/// Reads conversations as JSON rows from a file: a list of messages, one object
/// with `messages`, or a line with such an object for each conversation.
/// @throws Error{io} for a file that cannot be read, Error{format} for one with
/// anything else, and what chat_row throws.
std::vector<std::string> read_chat_rows(
    const std::filesystem::path& path,
    const ChatAdditions& additions);

}  // namespace flatshard
