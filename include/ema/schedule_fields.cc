// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ema/internal/status_macros.h"
#include "ema/schedule.h"
#include "include/ema/internal/schedule_parts.h"
#include "server/base/nearest_name.h"
#include "server/base/quoted.h"

namespace ema {
namespace {

using BeforeStart = Schedule::BeforeStart;
using Fields = Schedule::Fields;
using ZeroInit = ConstantDecayRule::ZeroInit;

// One bit for each alternative of Schedule::Rule.
constexpr unsigned kHalfLife = 1;
constexpr unsigned kConstantDecay = 2;
constexpr unsigned kInverseGamma = 4;
constexpr unsigned kRamp = 8;
constexpr unsigned kPowerFunction = 16;
constexpr unsigned kUniform = 32;
constexpr unsigned kCopy = 64;
constexpr unsigned kExponentialRamp = 128;
constexpr unsigned kDecays = 256;
constexpr unsigned kMeanOfLast = 512;
constexpr unsigned kAnyRule = 1023;
constexpr unsigned kWarmUps = kInverseGamma | kRamp | kExponentialRamp;

struct FieldInfo {
  const char* name;
  unsigned rules;  // That have this field.
  bool names_rule;
  const char* example;
};

constexpr std::array<FieldInfo, 24> kFields = {{
    {"half_life", kHalfLife, true, "1000ba"},
    {"ramp_ratio", kHalfLife, true, "0.09"},
    {"debias", kHalfLife, false, "true"},
    {"smoothing", kConstantDecay, true, "0.999"},
    {"zero_init", kConstantDecay, false, "debias"},
    {"inv_gamma", kInverseGamma, true, "1"},
    {"power", kInverseGamma, false, "0.75"},
    {"ramp", kRamp, true, "10"},
    {"min_decay", kInverseGamma | kRamp, false, "0"},
    {"exp_ramp", kExponentialRamp, true, "2000"},
    {"max_decay", kWarmUps, false, "0.9999"},
    {"count_offset", kWarmUps, false, "1"},
    {"decays", kDecays, true, "0dur:0.996 1dur:1"},
    {"decays_shape", kDecays, false, "cosine"},
    {"sigma_rel", kPowerFunction, true, "0.05"},
    {"age_offset", kPowerFunction, false, "1"},
    {"uniform", kUniform, true, "true"},
    {"mean_of_last", kMeanOfLast, true, "5"},
    {"copy", kCopy, true, "true"},
    {"update_interval", kAnyRule, false, "5ba"},
    {"interval_phase", kAnyRule, false, "1"},
    {"ema_start", kAnyRule, false, "0.1dur"},
    {"before_start", kAnyRule, false, "reinit"},
    {"ema_end", kAnyRule, false, "0.9dur"},
}};

const FieldInfo* FindField(std::string_view name) {
  for (const FieldInfo& field : kFields) {
    if (name == field.name) return &field;
  }
  return nullptr;
}

// Names of the fields that name one of `rules`: "half_life or ramp_ratio".
std::string RuleNames(unsigned rules) {
  std::vector<std::string> names;
  for (const FieldInfo& field : kFields) {
    if (field.names_rule && (field.rules & rules) != 0) names.emplace_back(field.name);
  }
  return absl::StrJoin(names, " or ");
}

std::string_view Stripped(std::string_view text) {
  const absl::string_view stripped =
      absl::StripAsciiWhitespace(absl::string_view(text.data(), text.size()));
  return {stripped.data(), stripped.size()};
}

absl::Status UnknownField(std::string_view name) {
  const std::string_view nearest =
      NearestName(name, kFields, [](const FieldInfo& field) { return field.name; });
  return BadSchedule(absl::StrCat("unknown field ", Quoted(name), "; did you mean \"",
                                  std::string(nearest), "\", such as ", std::string(nearest), "=",
                                  FindField(nearest)->example, "?"));
}

absl::Status BadValue(const FieldInfo& field, std::string_view value, std::string_view must) {
  return BadSchedule(absl::StrCat(field.name, " ", Quoted(value), ": must be ", std::string(must),
                                  ", such as ", field.name, "=", field.example));
}

// The given fields by name. What is absent, or false, keeps the value that the caller has.
class Values {
 public:
  // BAD_SCHEDULE: an unknown name, or one twice.
  static absl::StatusOr<Values> Create(const Fields& fields);

  // The one rule that is named, and the field that names it first.
  // BAD_SCHEDULE: none, two, or a field that it does not have.
  absl::StatusOr<const FieldInfo*> NamedRule() const;

  absl::StatusOr<double> Number(const char* name, double absent) const;
  absl::StatusOr<int64_t> Whole(const char* name, int64_t absent) const;
  absl::StatusOr<bool> Flag(const char* name) const;
  absl::StatusOr<std::optional<TrainingDuration>> Duration(const char* name) const;
  // Of a field that is there.
  absl::StatusOr<std::vector<DecaysRule::Point>> Points(const char* name) const;
  // The index in `words`; `absent` without it.
  absl::StatusOr<int> Word(const char* name, absl::Span<const char* const> words, int absent) const;

 private:
  // Null: absent.
  const std::string* Find(const FieldInfo& field) const { return values_[&field - kFields.data()]; }

  // By index in kFields; owned by the caller of Create().
  std::array<const std::string*, kFields.size()> values_ = {};
};

absl::StatusOr<Values> Values::Create(const Fields& fields) {
  Values values;
  for (const auto& [name, value] : fields) {
    const FieldInfo* const field = FindField(name);
    if (field == nullptr) return UnknownField(name);
    const std::string*& place = values.values_[field - kFields.data()];
    if (place != nullptr) {
      return BadSchedule(absl::StrCat(name, " is given twice, ", Quoted(*place), " and ",
                                      Quoted(value), "; give one, such as ", name, "=",
                                      field->example));
    }
    place = &value;
  }
  return values;
}

absl::StatusOr<const FieldInfo*> Values::NamedRule() const {
  const FieldInfo* named = nullptr;
  for (const FieldInfo& field : kFields) {
    const std::string* const value = Find(field);
    if (!field.names_rule || value == nullptr) continue;
    if ((field.rules & (kUniform | kCopy)) != 0) {
      EMA_ASSIGN_OR_RETURN(const bool is_set, Flag(field.name));
      if (!is_set) continue;
    }
    if (named == nullptr) named = &field;
    if (named->rules == field.rules) continue;
    return BadSchedule(
        absl::StrCat(named->name, " and ", field.name, " cannot both be given: ", named->name, " ",
                     Quoted(*Find(*named)), " and ", field.name, " ", Quoted(*value),
                     " are two rules; give one, such as ", named->name, "=", named->example));
  }
  for (const FieldInfo& field : kFields) {
    const std::string* const value = Find(field);
    if (value == nullptr || field.names_rule) continue;
    if (named != nullptr && (field.rules & named->rules) != 0) continue;
    if (named == nullptr && field.rules == kAnyRule) continue;
    const FieldInfo& owner = *std::find_if(kFields.begin(), kFields.end(), [&](const auto& other) {
      return other.names_rule && (other.rules & field.rules) != 0;
    });
    return BadSchedule(absl::StrCat(field.name, " ", Quoted(*value), ": has no use ",
                                    named == nullptr ? "alone" : absl::StrCat("with ", named->name),
                                    "; it belongs to ", RuleNames(field.rules), ", such as ",
                                    owner.name, "=", owner.example, ", ", field.name, "=",
                                    field.example));
  }
  if (named == nullptr) {
    return BadSchedule(absl::StrCat("a schedule needs one of ", RuleNames(kAnyRule),
                                    ", such as half_life=1000ba"));
  }
  return named;
}

absl::StatusOr<double> Values::Number(const char* name, double absent) const {
  const FieldInfo& field = *FindField(name);
  const std::string* const text = Find(field);
  if (text == nullptr) return absent;
  double value = 0;
  const char* const end = text->data() + text->size();
  const std::from_chars_result result = std::from_chars(text->data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || !std::isfinite(value)) {
    return BadValue(field, *text, "a finite number");
  }
  return value;
}

absl::StatusOr<int64_t> Values::Whole(const char* name, int64_t absent) const {
  const FieldInfo& field = *FindField(name);
  const std::string* const text = Find(field);
  if (text == nullptr) return absent;
  int64_t value = 0;
  const char* const end = text->data() + text->size();
  const std::from_chars_result result = std::from_chars(text->data(), end, value);
  if (result.ec != std::errc() || result.ptr != end)
    return BadValue(field, *text, "a whole number");
  return value;
}

absl::StatusOr<bool> Values::Flag(const char* name) const {
  const FieldInfo& field = *FindField(name);
  const std::string* const text = Find(field);
  if (text == nullptr || *text == "false") return false;
  if (*text == "true") return true;
  return BadValue(field, *text, "\"true\" or \"false\"");
}

absl::StatusOr<std::optional<TrainingDuration>> Values::Duration(const char* name) const {
  const std::string* const text = Find(*FindField(name));
  if (text == nullptr) return std::optional<TrainingDuration>();
  const absl::StatusOr<TrainingDuration> duration = TrainingDuration::Parse(*text);
  if (duration.ok()) return std::optional<TrainingDuration>(*duration);
  return BadSchedule(absl::StrCat(name, " ", duration.status().message()));
}

absl::StatusOr<std::vector<DecaysRule::Point>> Values::Points(const char* name) const {
  const FieldInfo& field = *FindField(name);
  const std::string& text = *Find(field);
  std::vector<DecaysRule::Point> points;
  for (const absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(word, absl::MaxSplits(':', 1));
    const absl::StatusOr<TrainingDuration> time = TrainingDuration::Parse(parts.first);
    DecaysRule::Point point;
    if (!time.ok() || !absl::SimpleAtod(parts.second, &point.decay)) {
      return BadValue(field, text, "times with decays, TIME:DECAY");
    }
    point.time = *time;
    points.push_back(point);
  }
  return points;
}

absl::StatusOr<int> Values::Word(const char* name, absl::Span<const char* const> words,
                                 int absent) const {
  const FieldInfo& field = *FindField(name);
  const std::string* const text = Find(field);
  if (text == nullptr) return absent;
  const auto it = std::find(words.begin(), words.end(), *text);
  if (it != words.end()) return static_cast<int>(it - words.begin());
  return BadValue(field, *text, absl::StrJoin(words, " or "));
}

// By the enumerators' numbers; kOff is what an absent field means.
constexpr std::array<const char*, 3> kZeroInits = {"off", "plain", "debias"};
constexpr std::array<const char*, 2> kShapes = {"linear", "cosine"};
constexpr std::array<const char*, 3> kBeforeStarts = {"reinit", "copy", "hold"};

absl::StatusOr<Schedule::Rule> ReadHalfLife(const Values& values) {
  HalfLifeRule rule;
  EMA_ASSIGN_OR_RETURN(const std::optional<TrainingDuration> half_life,
                       values.Duration("half_life"));
  EMA_ASSIGN_OR_RETURN(rule.ramp_ratio, values.Number("ramp_ratio", 0));
  EMA_ASSIGN_OR_RETURN(rule.debias, values.Flag("debias"));
  if (!half_life.has_value() && rule.ramp_ratio == 0) {
    return BadSchedule("ramp_ratio 0: without a half_life it must be above 0, such as 0.09");
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  rule.half_life = half_life.value_or(TrainingDuration{kInfinity, TimeUnit::kBatch});
  return rule;
}

absl::StatusOr<Schedule::Rule> ReadDecays(const Values& values) {
  DecaysRule rule;
  EMA_ASSIGN_OR_RETURN(rule.points, values.Points("decays"));
  EMA_ASSIGN_OR_RETURN(const int shape, values.Word("decays_shape", kShapes, 0));
  rule.shape = static_cast<DecaysRule::Shape>(shape);
  return rule;
}

absl::StatusOr<Schedule::Rule> ReadRule(const Values& values, unsigned kind) {
  switch (kind) {
    case kHalfLife:
      return ReadHalfLife(values);
    case kConstantDecay: {
      ConstantDecayRule rule;
      EMA_ASSIGN_OR_RETURN(rule.smoothing, values.Number("smoothing", 0));
      EMA_ASSIGN_OR_RETURN(const int zero_init, values.Word("zero_init", kZeroInits, 0));
      rule.zero_init = static_cast<ZeroInit>(zero_init);
      return rule;
    }
    case kInverseGamma: {
      InverseGammaRule rule;
      EMA_ASSIGN_OR_RETURN(rule.inv_gamma, values.Number("inv_gamma", rule.inv_gamma));
      EMA_ASSIGN_OR_RETURN(rule.power, values.Number("power", rule.power));
      EMA_ASSIGN_OR_RETURN(rule.min_decay, values.Number("min_decay", rule.min_decay));
      EMA_ASSIGN_OR_RETURN(rule.max_decay, values.Number("max_decay", rule.max_decay));
      EMA_ASSIGN_OR_RETURN(rule.count_offset, values.Number("count_offset", 0));
      return rule;
    }
    case kRamp: {
      RampRule rule;
      EMA_ASSIGN_OR_RETURN(rule.ramp, values.Number("ramp", rule.ramp));
      EMA_ASSIGN_OR_RETURN(rule.min_decay, values.Number("min_decay", rule.min_decay));
      EMA_ASSIGN_OR_RETURN(rule.max_decay, values.Number("max_decay", rule.max_decay));
      EMA_ASSIGN_OR_RETURN(rule.count_offset, values.Number("count_offset", 0));
      return rule;
    }
    case kExponentialRamp: {
      ExponentialRampRule rule;
      EMA_ASSIGN_OR_RETURN(rule.exp_ramp, values.Number("exp_ramp", rule.exp_ramp));
      EMA_ASSIGN_OR_RETURN(rule.max_decay, values.Number("max_decay", rule.max_decay));
      EMA_ASSIGN_OR_RETURN(rule.count_offset, values.Number("count_offset", 0));
      return rule;
    }
    case kDecays:
      return ReadDecays(values);
    case kPowerFunction: {
      PowerFunctionRule rule;
      EMA_ASSIGN_OR_RETURN(rule.sigma_rel, values.Number("sigma_rel", rule.sigma_rel));
      EMA_ASSIGN_OR_RETURN(rule.age_offset, values.Number("age_offset", rule.age_offset));
      return rule;
    }
    case kUniform:
      return UniformRule{};
    case kMeanOfLast: {
      MeanOfLastRule rule;
      EMA_ASSIGN_OR_RETURN(rule.count, values.Whole("mean_of_last", rule.count));
      return rule;
    }
    default:
      return CopyRule{};
  }
}

// Adds the fields of a rule.
class RuleWriter {
 public:
  explicit RuleWriter(Fields* fields) : fields_(*fields) {}

  void operator()(const HalfLifeRule& rule) {
    if (!std::isinf(rule.half_life.value)) Add("half_life", rule.half_life.ToString());
    AddUnless(0, "ramp_ratio", rule.ramp_ratio);
    if (rule.debias) Add("debias", "true");
  }
  void operator()(const ConstantDecayRule& rule) {
    Add("smoothing", NumberText(rule.smoothing));
    if (rule.zero_init == ZeroInit::kOff) return;
    Add("zero_init", kZeroInits[static_cast<int>(rule.zero_init)]);
  }
  void operator()(const InverseGammaRule& rule) {
    constexpr InverseGammaRule kDefault;
    Add("inv_gamma", NumberText(rule.inv_gamma));
    AddUnless(kDefault.power, "power", rule.power);
    AddUnless(kDefault.min_decay, "min_decay", rule.min_decay);
    AddUnless(kDefault.max_decay, "max_decay", rule.max_decay);
    AddUnless(0, "count_offset", rule.count_offset);
  }
  void operator()(const RampRule& rule) {
    constexpr RampRule kDefault;
    Add("ramp", NumberText(rule.ramp));
    AddUnless(kDefault.min_decay, "min_decay", rule.min_decay);
    AddUnless(kDefault.max_decay, "max_decay", rule.max_decay);
    AddUnless(0, "count_offset", rule.count_offset);
  }
  void operator()(const ExponentialRampRule& rule) {
    constexpr ExponentialRampRule kDefault;
    Add("exp_ramp", NumberText(rule.exp_ramp));
    AddUnless(kDefault.max_decay, "max_decay", rule.max_decay);
    AddUnless(0, "count_offset", rule.count_offset);
  }
  void operator()(const DecaysRule& rule) {
    const auto write = [](std::string* text, const DecaysRule::Point& point) {
      absl::StrAppend(text, point.time.ToString(), ":", NumberText(point.decay));
    };
    Add("decays", absl::StrJoin(rule.points, " ", write));
    if (rule.shape == DecaysRule::Shape::kLinear) return;
    Add("decays_shape", kShapes[static_cast<int>(rule.shape)]);
  }
  void operator()(const PowerFunctionRule& rule) {
    Add("sigma_rel", NumberText(rule.sigma_rel));
    if (rule.age_offset != 0) Add("age_offset", NumberText(rule.age_offset));
  }
  void operator()(const UniformRule& /*rule*/) { Add("uniform", "true"); }
  void operator()(const MeanOfLastRule& rule) { Add("mean_of_last", absl::StrCat(rule.count)); }
  void operator()(const CopyRule& /*rule*/) { Add("copy", "true"); }

 private:
  void Add(const char* name, std::string value) { fields_.emplace_back(name, std::move(value)); }
  void AddUnless(double absent, const char* name, double value) {
    if (value != absent) Add(name, NumberText(value));
  }

  Fields& fields_;
};

}  // namespace

Fields Schedule::ToFields() const {
  Fields fields;
  std::visit(RuleWriter(&fields), options_.rule);
  if (update_interval_ != DefaultInterval(options_.rule)) {
    fields.emplace_back("update_interval", update_interval_.ToString());
  }
  if (options_.interval_phase != 0) {
    fields.emplace_back("interval_phase", absl::StrCat(options_.interval_phase));
  }
  if (options_.start.value != 0) fields.emplace_back("ema_start", options_.start.ToString());
  if (options_.before_start != BeforeStart::kReinit) {
    fields.emplace_back("before_start", kBeforeStarts[static_cast<int>(options_.before_start)]);
  }
  if (options_.end.has_value()) fields.emplace_back("ema_end", options_.end->ToString());
  return fields;
}

absl::StatusOr<Schedule> Schedule::FromFields(const Fields& fields) {
  EMA_ASSIGN_OR_RETURN(const Values values, Values::Create(fields));
  EMA_ASSIGN_OR_RETURN(const FieldInfo* const named, values.NamedRule());
  Options options;
  EMA_ASSIGN_OR_RETURN(options.rule, ReadRule(values, named->rules));
  EMA_ASSIGN_OR_RETURN(options.update_interval, values.Duration("update_interval"));
  EMA_ASSIGN_OR_RETURN(options.interval_phase, values.Whole("interval_phase", 0));
  EMA_ASSIGN_OR_RETURN(const std::optional<TrainingDuration> start, values.Duration("ema_start"));
  options.start = start.value_or(options.start);
  EMA_ASSIGN_OR_RETURN(const int before_start, values.Word("before_start", kBeforeStarts, 0));
  options.before_start = static_cast<BeforeStart>(before_start);
  EMA_ASSIGN_OR_RETURN(options.end, values.Duration("ema_end"));
  return Create(options);
}

std::string Schedule::ToString() const {
  const Fields fields = ToFields();
  if (is_copy() && fields.size() == 1) return "copy";
  return absl::StrJoin(fields, ", ", absl::PairFormatter("="));
}

absl::StatusOr<Schedule> Schedule::Parse(std::string_view text) {
  if (Stripped(text) == "copy") return Create({});
  if (text.find('=') == std::string_view::npos) {
    const absl::StatusOr<TrainingDuration> half_life = TrainingDuration::Parse(text);
    if (half_life.ok()) return Create({.rule = HalfLifeRule{*half_life}});
    return BadSchedule(absl::StrCat("half_life ", half_life.status().message(), " (or \"copy\")"));
  }
  Fields fields;
  for (bool is_last = false; !is_last;) {
    const size_t comma = text.find(',');
    is_last = comma == std::string_view::npos;
    const std::string_view field = Stripped(text.substr(0, comma));
    const size_t equals = field.find('=');
    if (equals == std::string_view::npos) {
      return BadSchedule(
          absl::StrCat("field ", Quoted(field), ": must be name=value, such as half_life=1000ba"));
    }
    fields.emplace_back(Stripped(field.substr(0, equals)), Stripped(field.substr(equals + 1)));
    if (!is_last) text.remove_prefix(comma + 1);
  }
  return FromFields(fields);
}

}  // namespace ema
