// Sums in double precision over the elements of a block, the same in every variant: element i of a block goes to
// lane i % kLanes, in order, and at the end the lanes are added up pairwise.

constexpr int kLanes = 16;

#if BMT_VECTOR
constexpr int kVectors = kLanes / kWidth;  // vectors that make up all lanes once
struct Lanes {
  Wide at[kVectors];
};
#endif

struct LaneSums {
  double at[kLanes];
};

BMT_INLINE LaneSums no_sums() {
  LaneSums sums;
  for (int lane = 0; lane < kLanes; ++lane) sums.at[lane] = 0.0;
  return sums;
}

#if BMT_VECTOR
BMT_INLINE Lanes no_lanes() {
  Lanes lanes;
  for (int j = 0; j < kVectors; ++j) lanes.at[j] = wide_zero();
  return lanes;
}

BMT_INLINE LaneSums lane_sums(const Lanes& lanes) {
  LaneSums sums;
  for (int j = 0; j < kVectors; ++j) store_wide(sums.at + j * kWidth, lanes.at[j]);
  return sums;
}
#endif

BMT_INLINE double total(LaneSums sums) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sums.at[lane] += sums.at[lane + half];
  }
  return sums.at[0];
}
