// SPDX-License-Identifier: Apache-2.0
//
// Checks of emactl's options for CLI11. Each returns what is wrong with a text, or "".
#ifndef EMA_CLIENT_CLI_ARGUMENT_CHECKS_H_
#define EMA_CLIENT_CLI_ARGUMENT_CHECKS_H_

#include <string>

namespace ema::cli {

// Whole decimal numbers, at least 0 and at least 1. CLI11's own checks accept numbers that
// overflow, and read 010 as 8.
std::string CheckCount(const std::string& text);
std::string CheckPositive(const std::string& text);

// A version's number; the message for a label says how to find its version.
std::string CheckVersion(const std::string& text);

// Texts that ParseTrackOption() and ParseVersionOrLabel() accept.
std::string CheckTrack(const std::string& text);
std::string CheckVersionOrLabel(const std::string& text);
// Dtypes to which the server can cast.
std::string CheckDtype(const std::string& text);
// Texts that ParseOverflowPolicy() accepts.
std::string CheckOverflow(const std::string& text);
// Texts that ParseNonFinitePolicy() accepts.
std::string CheckNonFinite(const std::string& text);
// A label to be set. It must not be a number, which --version and --to take for a version.
std::string CheckLabel(const std::string& text);

// A duration above 0, such as "500ms".
std::string CheckDuration(const std::string& text);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_ARGUMENT_CHECKS_H_
