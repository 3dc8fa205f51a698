// SPDX-License-Identifier: Apache-2.0
//
// NVIDIA's management library, as far as LibTorch asks it for who has a GPU's memory when it finds
// none: of the name of the real one, for a program that is linked with it.
#ifndef EMA_TESTS_TESTUTIL_FAKE_NVML_H_
#define EMA_TESTS_TESTUTIL_FAKE_NVML_H_

extern "C" {

// Whether it says that one may not see which processes there are, as on a part (MIG) of a GPU.
void ema_fake_nvml_refuse(bool value);

}  // extern "C"

#endif  // EMA_TESTS_TESTUTIL_FAKE_NVML_H_
