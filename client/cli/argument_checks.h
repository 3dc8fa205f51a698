// SPDX-License-Identifier: Apache-2.0
//
// What emactl's options may be. Checks for CLI11: what is wrong with a text, or "".
#ifndef EMA_CLIENT_CLI_ARGUMENT_CHECKS_H_
#define EMA_CLIENT_CLI_ARGUMENT_CHECKS_H_

#include <string>

namespace ema::cli {

// Whole numbers in decimal, 0 or 1 or more. CLI11's own checks take a number that is too large for
// the largest, and 010 for 8.
std::string CheckCount(const std::string& text);
std::string CheckPositive(const std::string& text);

// A version's number, where a label would not do.
std::string CheckVersion(const std::string& text);

// What ParseTrackOption() and ParseVersionOrLabel() take.
std::string CheckTrack(const std::string& text);
std::string CheckVersionOrLabel(const std::string& text);
// What the server casts to.
std::string CheckDtype(const std::string& text);
// What ParseNonFinitePolicy() takes.
std::string CheckNonFinite(const std::string& text);
// Of a label that is given: --version and --to take one that is a number for a version's.
std::string CheckLabel(const std::string& text);

// Such as "500ms", above 0.
std::string CheckDuration(const std::string& text);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_ARGUMENT_CHECKS_H_
