// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/array.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace nb = nanobind;

namespace ema::python {
namespace {

// std::string: the distribution's absl::string_view is not std::string_view.
absl::Status BadArray(std::string_view name, const std::string& what) {
  return BadRequest(absl::StrCat("array \"", std::string(name), "\": ", what));
}

// The shard's place in the row-major elements of `whole`; nullopt if it is not one contiguous piece
// of that.
std::optional<int64_t> FirstElement(const Shard& whole, const Shard& shard) {
  const size_t rank = whole.extents.size();
  size_t dim = 0;
  while (dim < rank && shard.extents[dim] == 1) ++dim;
  for (size_t i = dim + 1; i < rank; ++i) {
    if (shard.extents[i] != whole.extents[i]) return std::nullopt;
  }
  int64_t first = 0;
  for (size_t i = 0; i < rank; ++i) {
    const int64_t offset = shard.offsets[i] - whole.offsets[i];
    if (offset < 0 || shard.extents[i] > whole.extents[i] - offset) return std::nullopt;
    first = first * whole.extents[i] + offset;
  }
  return first;
}

// Whether `offsets` are those of a range of a box: its first element's index in the box, the box's
// offsets, and its extents.
bool IsInBox(const std::vector<int64_t>& offsets) {
  return offsets.size() > 1 && offsets.size() % 2 == 1;
}

// Whether an array with this number of dimensions can have these offsets.
bool AreOffsets(const std::vector<int64_t>& offsets, size_t dimensions) {
  return offsets.size() == dimensions || (dimensions == 1 && IsInBox(offsets));
}

// Whether an array is a range of the row-major elements of its tensor or of a box in it.
bool IsRange(const Array& array, const TensorSpec& spec) {
  if (!array.offsets.has_value() || array.spec.shape.size() != 1) return false;
  if (IsInBox(*array.offsets)) return array.offsets->size() == 1 + 2 * spec.shape.size();
  return array.offsets->size() == 1 && spec.shape.size() != 1;
}

// Where the range counts its elements: in the whole tensor, or in a box of it.
Shard BoxOfRange(const Array& range, const Manifest& manifest, int64_t tensor_index) {
  if (!IsInBox(*range.offsets)) return WholeTensor(manifest, tensor_index);
  const auto begin = range.offsets->begin() + 1;
  const auto middle = begin + (range.offsets->size() - 1) / 2;
  return Shard{tensor_index, {begin, middle}, {middle, range.offsets->end()}};
}

// As FirstElement(), of an array that is a range.
std::optional<int64_t> FirstElementOfRange(const Array& range, const Manifest& manifest,
                                           const Shard& shard) {
  const auto first = FirstElement(BoxOfRange(range, manifest, shard.tensor_index), shard);
  if (!first.has_value()) return std::nullopt;
  const int64_t place = *first - range.offsets->front();
  if (place < 0 || shard.element_count() > range.spec.shape.front() - place) return std::nullopt;
  return place;
}

// Where in the memory of `whole` the first element of the shard lies, counted in elements.
int64_t FirstPlace(const Shard& whole, const Shard& shard, const Strides& strides) {
  int64_t place = 0;
  for (size_t i = 0; i < strides.size(); ++i) {
    place += (shard.offsets[i] - whole.offsets[i]) * strides[i];
  }
  return place;
}

// The box of its tensor that an array is. `only_shard`: the one that the rank pushes; null: there
// are more. nullopt: its shape is not the tensor's, nor the shard's.
std::optional<Shard> BoxOf(const Array& array, const Manifest& manifest, int64_t tensor_index,
                           const Shard* only_shard) {
  const TensorSpec& spec = manifest.tensor(tensor_index);
  if (array.offsets.has_value()) {
    if (array.spec.shape.size() != spec.shape.size()) return std::nullopt;
    if (array.offsets->size() != spec.shape.size()) return std::nullopt;
    return Shard{tensor_index, *array.offsets, array.spec.shape};
  }
  if (array.spec.shape == spec.shape) return WholeTensor(manifest, tensor_index);
  if (only_shard != nullptr && array.spec.shape == only_shard->extents) return *only_shard;
  return std::nullopt;
}

// "a, b and 3 more"
std::string ListNames(const std::vector<std::string>& names) {
  constexpr size_t kMostNames = 50;
  if (names.size() <= kMostNames) return absl::StrJoin(names, ", ");
  return absl::StrCat(absl::StrJoin(names.begin(), names.begin() + kMostNames, ", "), " and ",
                      names.size() - kMostNames, " more");
}

}  // namespace

std::optional<Dtype> DtypeOf(nb::dlpack::dtype type) {
  if (type.lanes != 1) return std::nullopt;
  switch (static_cast<nb::dlpack::dtype_code>(type.code)) {
    case nb::dlpack::dtype_code::Float:
      if (type.bits == 16) return Dtype::kFloat16;
      if (type.bits == 32) return Dtype::kFloat32;
      if (type.bits == 64) return Dtype::kFloat64;
      return std::nullopt;
    case nb::dlpack::dtype_code::Bfloat:
      if (type.bits == 16) return Dtype::kBFloat16;
      return std::nullopt;
    case nb::dlpack::dtype_code::Int:
      if (type.bits == 8) return Dtype::kInt8;
      if (type.bits == 16) return Dtype::kInt16;
      if (type.bits == 32) return Dtype::kInt32;
      if (type.bits == 64) return Dtype::kInt64;
      return std::nullopt;
    case nb::dlpack::dtype_code::UInt:
      if (type.bits == 8) return Dtype::kUInt8;
      return std::nullopt;
    case nb::dlpack::dtype_code::Bool:
      if (type.bits == 8) return Dtype::kBool;
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

bool IsContiguous(absl::Span<const int64_t> shape, absl::Span<const int64_t> strides) {
  int64_t stride = 1;
  bool is_contiguous = true;
  for (size_t i = shape.size(); i > 0; --i) {
    is_contiguous &= shape[i - 1] == 1 || strides[i - 1] == stride;
    stride *= shape[i - 1];
  }
  return is_contiguous || stride == 0;  // Without elements, strides do not matter.
}

absl::StatusOr<Array> Array::Read(std::string_view name, nb::handle object, std::string_view dtype,
                                  std::optional<std::vector<int64_t>> offsets,
                                  bool may_have_strides) {
  Array result;
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(nb::borrow(object), array, /*convert=*/false)) {
    return BadArray(name, absl::StrCat("a ", nb::type_name(object.type()).c_str(),
                                       " cannot be read through DLPack or the buffer protocol"));
  }
  if (array.device_type() == nb::device::cuda::value) {
    result.gpu = array.device_id();
  } else if (array.device_type() != nb::device::cpu::value) {
    return BadArray(name, absl::StrCat("is neither in host memory nor on a GPU of CUDA's, but on "
                                       "DLPack's device ",
                                       array.device_type()));
  }
  // As of a PyTorch tensor that is a subclass's wrapper around others.
  if (array.data() == nullptr && array.nbytes() > 0) {
    return BadArray(name, absl::StrCat("a ", nb::type_name(object.type()).c_str(),
                                       " without memory of its own"));
  }
  Strides strides;
  for (size_t i = 0; i < array.ndim(); ++i) {
    result.spec.shape.push_back(static_cast<int64_t>(array.shape(i)));
    strides.push_back(array.stride(i));
  }
  if (!IsContiguous(result.spec.shape, strides)) {
    if (!may_have_strides || result.gpu >= 0) {
      return BadArray(name, "is not row-major and contiguous");
    }
    result.strides = std::move(strides);
  }
  std::optional<Dtype> own = DtypeOf(array.dtype());
  if (!dtype.empty()) {
    EMA_ASSIGN_OR_RETURN(const Dtype meant, ParseDtype(dtype));
    if (DtypeSize(meant) != static_cast<int64_t>(array.itemsize())) {
      return BadArray(name, absl::StrCat("elements of ", array.itemsize(), " bytes are no ",
                                         std::string(dtype)));
    }
    own = meant;
  }
  if (!own.has_value()) {
    return BadArray(name,
                    absl::StrCat("its dtype (DLPack code ", int{array.dtype().code}, ", ",
                                 int{array.dtype().bits}, " bits) is not one of the server's"));
  }
  result.spec.name = std::string(name);
  result.spec.dtype = *own;
  if (offsets.has_value() && !AreOffsets(*offsets, array.ndim())) {
    return BadArray(name,
                    absl::StrCat(offsets->size(), " offsets for ", array.ndim(), " dimensions"));
  }
  result.offsets = std::move(offsets);
  result.bytes = {static_cast<const std::byte*>(array.data()), array.nbytes()};
  result.owner = std::make_shared<nb::ndarray<nb::ro>>(std::move(array));
  return result;
}

std::optional<Array> Array::FromDlpack(std::string_view name,
                                       std::shared_ptr<const DlpackTensor> tensor,
                                       std::optional<std::vector<int64_t>> offsets) {
  const nb::dlpack::dltensor& given = tensor->tensor;
  const bool is_on_gpu = given.device.device_type == nb::device::cuda::value;
  if (!is_on_gpu && given.device.device_type != nb::device::cpu::value) return std::nullopt;
  const std::optional<Dtype> dtype = DtypeOf(given.dtype);
  if (!dtype.has_value()) return std::nullopt;
  Array result;
  result.spec.name = std::string(name);
  result.spec.dtype = *dtype;
  result.spec.shape.assign(given.shape, given.shape + given.ndim);
  if (offsets.has_value() && !AreOffsets(*offsets, result.spec.shape.size())) return std::nullopt;
  result.offsets = std::move(offsets);
  if (given.strides != nullptr) {
    const absl::Span<const int64_t> strides(given.strides, given.ndim);
    if (!IsContiguous(result.spec.shape, strides)) {
      if (is_on_gpu) return std::nullopt;
      result.strides.assign(strides.begin(), strides.end());
    }
  }
  if (is_on_gpu) result.gpu = given.device.device_id;
  const int64_t size_bytes = result.spec.element_count() * DtypeSize(*dtype);
  if (given.data == nullptr && size_bytes > 0) return std::nullopt;
  result.bytes = {static_cast<const std::byte*>(given.data) + given.byte_offset,
                  static_cast<size_t>(size_bytes)};
  result.owner = std::move(tensor);
  return result;
}

absl::Status Array::CheckOnHost() const {
  if (gpu < 0) return absl::OkStatus();
  return BadArray(spec.name, absl::StrCat("is not in host memory, but on GPU ", gpu));
}

absl::StatusOr<FoundShards> FindShards(const Manifest& manifest, const RankLayout& layout,
                                       const std::vector<const Array*>& arrays, size_t begin,
                                       size_t end) {
  std::vector<std::string> unexpected;
  std::vector<std::string> missing;
  std::vector<std::string> wrong;
  std::vector<const Array*> by_tensor(manifest.tensor_count(), nullptr);
  std::vector<int64_t> shards_of(manifest.tensor_count(), 0);
  for (const Shard& shard : layout.shards()) ++shards_of[shard.tensor_index];
  for (const Array* array : arrays) {
    if (const auto index = manifest.Find(array->spec.name)) {
      by_tensor[*index] = array;
    } else {
      unexpected.push_back(array->spec.name);
    }
  }

  FoundShards result;
  const Shard* last = nullptr;
  for (const Shard& shard : layout.shards().subspan(begin, end - begin)) {
    const TensorSpec& spec = manifest.tensor(shard.tensor_index);
    const bool first_of_tensor = last == nullptr || last->tensor_index != shard.tensor_index;
    last = &shard;
    const Array* array = by_tensor[shard.tensor_index];
    if (array == nullptr) {
      // The run says whether frozen ones can be left out.
      if (&shard >= layout.frozen_shards().data()) {
        result.bytes.emplace_back();
        result.gpus.push_back(-1);
        result.strides.emplace_back();
      } else if (first_of_tensor) {
        missing.push_back(spec.name);
      }
      continue;
    }
    const bool is_range = IsRange(*array, spec);
    const std::optional<Shard> box = BoxOf(*array, manifest, shard.tensor_index,
                                           shards_of[shard.tensor_index] == 1 ? &shard : nullptr);
    if (array->spec.dtype != spec.dtype || !(is_range || box.has_value())) {
      if (first_of_tensor) {
        wrong.push_back(absl::StrCat("\"", spec.name, "\": ", spec.TypeString(), " in the model, ",
                                     array->spec.TypeString(), " given"));
      }
      continue;
    }
    auto first =
        is_range ? FirstElementOfRange(*array, manifest, shard) : FirstElement(*box, shard);
    if (!first.has_value()) {
      wrong.push_back(
          absl::StrCat("\"", spec.name, "\": the shard at [", absl::StrJoin(shard.offsets, ", "),
                       "] of extents [", absl::StrJoin(shard.extents, ", "),
                       "] is not a contiguous piece of what is given: give just the shard"));
      continue;
    }
    const int64_t size = DtypeSize(spec.dtype);
    if (!array->strides.empty() && !is_range) first = FirstPlace(*box, shard, array->strides);
    result.bytes.emplace_back(array->bytes.data() + *first * size, shard.element_count() * size);
    result.gpus.push_back(array->gpu);
    result.strides.push_back(array->strides);
  }

  if (missing.empty() && unexpected.empty() && wrong.empty()) return result;
  std::vector<std::string> parts;
  if (!missing.empty()) parts.push_back(absl::StrCat("missing: ", ListNames(missing)));
  if (!unexpected.empty()) {
    parts.push_back(absl::StrCat("not in the model: ", ListNames(unexpected)));
  }
  if (!wrong.empty()) {
    parts.push_back(absl::StrCat("wrong: ", ListNames(wrong)));
  }
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
                   absl::StrCat("arrays do not match the model; ", absl::StrJoin(parts, "; ")));
}

}  // namespace ema::python
