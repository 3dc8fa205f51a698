// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_BASE_STANDARD_FILES_H_
#define EMA_SERVER_BASE_STANDARD_FILES_H_

namespace ema {

// Where standard input, output or error was closed by whoever has started this program, opens
// something in its place that cannot be read or written. Else the next socket or file gets its
// number, and what is printed goes there. To be called before there are threads; also before
// main(), when the libraries are not ready.
void OccupyStandardFiles();

}  // namespace ema

#endif  // EMA_SERVER_BASE_STANDARD_FILES_H_
