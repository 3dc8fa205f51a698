// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_BASE_STANDARD_FILES_H_
#define EMA_SERVER_BASE_STANDARD_FILES_H_

namespace ema {

// If the parent process closed standard input, output or error, opens /dev/null in its place, so
// that a later socket or file does not get its number and receive printed text. Must be called
// before any thread starts; may be called before main(), when the libraries are not ready.
void OccupyStandardFiles();

}  // namespace ema

#endif  // EMA_SERVER_BASE_STANDARD_FILES_H_
