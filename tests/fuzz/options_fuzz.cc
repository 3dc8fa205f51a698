// SPDX-License-Identifier: Apache-2.0
//
// The server's options: a configuration file or, if the first byte is odd, arguments, each on a
// line. A file that is accepted is printed by --print-config, and read back with the same values.
#include <string>
#include <vector>

#include "server/ops/options.h"
#include "tests/fuzz/memory_text_file.h"

namespace ema {
namespace {

ParsedOptions Parse(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"ema-server"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  ParsedOptions parsed = ParseOptions(static_cast<int>(argv.size()), argv.data());
  EMA_FUZZ_CHECK(parsed.should_exit == !parsed.text.empty());
  EMA_FUZZ_CHECK(parsed.should_exit || parsed.exit_code == 0);
  return parsed;
}

// Without the comments that name the sources of the values.
std::string ValuesOf(std::string_view printed) {
  FuzzInput lines(reinterpret_cast<const uint8_t*>(printed.data()), printed.size());
  std::string values;
  while (!lines.empty()) {
    const std::string_view line = lines.Until('\n');
    values.append(line.substr(0, line.rfind("  # "))).append("\n");
  }
  return values;
}

void CheckFile(std::string_view text) {
  static MemoryTextFile* const file = new MemoryTextFile();
  const auto parse = [](std::string_view content, const std::vector<std::string>& flags) {
    file->Write(content);
    std::vector<std::string> arguments = {"--config", file->path()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return Parse(arguments);
  };
  const ParsedOptions parsed = parse(text, {});
  if (parsed.should_exit) {
    FuzzInput lines(reinterpret_cast<const uint8_t*>(parsed.text.data()), parsed.text.size());
    while (!lines.empty()) EMA_FUZZ_CHECK(IsPrintableUtf8(lines.Until('\n')));
    return;
  }
  const ParsedOptions printed = parse(text, {"--print-config"});
  const ParsedOptions again = parse(printed.text, {"--print-config"});
  EMA_FUZZ_CHECK(printed.exit_code == 0 && again.exit_code == 0);
  EMA_FUZZ_CHECK(ValuesOf(printed.text) == ValuesOf(again.text));
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ema::FuzzInput input(data, size);
  if (input.Byte() % 2 == 0) {
    ema::CheckFile(input.rest());
    return 0;
  }
  std::vector<std::string> arguments;
  while (!input.empty()) arguments.emplace_back(input.Until('\n'));
  ema::Parse(arguments);
  return 0;
}
