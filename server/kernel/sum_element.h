// SPDX-License-Identifier: Apache-2.0
//
// What one element adds to a track's statistics: the one definition, for the CPU and for a GPU,
// like fold_element.h.
#ifndef EMA_SERVER_KERNEL_SUM_ELEMENT_H_
#define EMA_SERVER_KERNEL_SUM_ELEMENT_H_

#include "server/kernel/fold_element.h"

namespace ema {

// The sums over some elements of an average.
struct SquareSums {
  double average = 0;     // Of average^2.
  double difference = 0;  // Of (raw - average)^2, where there is a raw value.
};

EMA_HOST_DEVICE inline void AddElement(SquareSums& sums, double average) {
  sums.average += average * average;
}
EMA_HOST_DEVICE inline void AddElement(SquareSums& sums, double average, double raw) {
  AddElement(sums, average);
  const double difference = raw - average;
  sums.difference += difference * difference;
}

inline void AddSums(SquareSums& sums, const SquareSums& other) {
  sums.average += other.average;
  sums.difference += other.difference;
}

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_SUM_ELEMENT_H_
