#pragma once

namespace flatshard::report {

// The texts of page.html, page.css and page.js, put here by CMake.
extern const char* const kPageHtml;
extern const char* const kPageStyle;
extern const char* const kPageScript;

}  // namespace flatshard::report
