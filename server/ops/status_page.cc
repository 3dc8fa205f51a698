// SPDX-License-Identifier: Apache-2.0
#include "server/ops/status_page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/ops/version.h"

namespace ema {
namespace {

constexpr char kHead[] = R"html(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="refresh" content="5">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>EMA Server</title>
<style>
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --line: #dfe3e8; --text: #1c2530; --soft: #5b6875;
  --good: #1a7f4b; --bad: #b3261e; --wait: #8a6100; --bar: #3b73c8;
  --c0: #2f6fd0; --c1: #c2571a; --c2: #26865a; --c3: #9b3fb5; --c4: #b58900; --c5: #0f8b8d; --c6: #b3365e; --c7: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161b; --card: #1b2128; --line: #303943; --text: #e6eaef; --soft: #9aa7b4;
  --good: #57c78a; --bad: #ff8a80; --wait: #e2b84a; --bar: #6ea3f0;
  --c0: #6ea3f0; --c1: #f09a5e; --c2: #5fc596; --c3: #cf8ae2; --c4: #e2c04a; --c5: #57c9cb; --c6: #f07ba0; --c7: #a3adba; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.2rem; background: var(--bg); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: baseline; margin-bottom: 1rem; }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.1rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
.state { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); } .wait { color: var(--wait); }
.soft, th, figcaption, footer { color: var(--soft); }
section, .card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .9rem 1.1rem; margin-bottom: 1rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem; margin-bottom: 1rem; } .cards .card { margin: 0; } .cards .card:first-child { grid-column: span 2; }
.card b { display: block; font-size: 1.2rem; font-weight: 600; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: 0 0 .8rem; } .facts div { display: flex; gap: .4rem; } .facts dt { color: var(--soft); } .facts dd { margin: 0; font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th { font-weight: 500; text-align: left; } th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } td.text { overflow-wrap: anywhere; }
.meter { height: .5rem; border-radius: .25rem; background: var(--line); margin: .4rem 0; overflow: hidden; } .meter i { display: block; height: 100%; background: var(--bar); }
figure { margin: .8rem 0 0; } svg { width: 100%; height: auto; max-height: 18rem; } svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .key { margin-right: .9rem; } .key::before { content: "\25CF\00A0"; }
.t0 { stroke: var(--c0); } .t1 { stroke: var(--c1); } .t2 { stroke: var(--c2); } .t3 { stroke: var(--c3); } .t4 { stroke: var(--c4); } .t5 { stroke: var(--c5); } .t6 { stroke: var(--c6); } .t7 { stroke: var(--c7); }
.key.t0 { color: var(--c0); } .key.t1 { color: var(--c1); } .key.t2 { color: var(--c2); } .key.t3 { color: var(--c3); } .key.t4 { color: var(--c4); } .key.t5 { color: var(--c5); } .key.t6 { color: var(--c6); } .key.t7 { color: var(--c7); }
footer a { color: inherit; margin-right: 1rem; }
</style></head><body>
)html";

std::string Bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  const int decimals = unit == 0 || value >= 100 ? 0 : 1;
  return absl::StrFormat("%.*f %s", decimals, value, kUnits[unit]);
}

std::string Time(absl::Duration duration) {
  constexpr int64_t kMinute = 60;
  constexpr int64_t kHour = 60 * kMinute;
  constexpr int64_t kDay = 24 * kHour;
  const int64_t seconds = std::max<int64_t>(absl::ToInt64Seconds(duration), 0);
  if (seconds < 2 * kMinute) return absl::StrCat(seconds, " s");
  if (seconds < 2 * kHour) return absl::StrCat(seconds / kMinute, " min");
  if (seconds < 2 * kDay) return absl::StrCat(seconds / kHour, " h");
  return absl::StrCat(seconds / kDay, " days");
}

std::string Number(double value) { return absl::StrFormat("%.4g", value); }

// A name and a value, which is HTML.
std::string Fact(const char* name, const std::string& value) {
  return absl::StrCat("<div><dt>", name, "</dt><dd>", value, "</dd></div>");
}

std::string Card(const char* name, const std::string& value, const std::string& below = "") {
  return absl::StrCat("<div class=\"card\"><span class=\"soft\">", name, "</span><b>", value,
                      "</b>", below, "</div>");
}

std::string Meter(int64_t used, int64_t most) {
  const double share = most > 0 ? static_cast<double>(used) / static_cast<double>(most) : 0;
  return absl::StrFormat("<div class=\"meter\"><i style=\"width:%.1f%%\"></i></div>",
                         100 * std::clamp(share, 0.0, 1.0));
}

std::string UsageCard(const char* name, int64_t used, int64_t limit) {
  return Card(name, absl::StrCat(used, " <span class=\"soft\">of ", limit, "</span>"),
              Meter(used, limit));
}

std::string Header(const ServerState& state) {
  const std::string message(state.health.message());
  return absl::StrCat(
      "<header><h1>EMA Server</h1><span class=\"state ",
      state.health.ok() ? "good\">serving" : "bad\">not serving: ",
      state.health.ok() ? "" : EscapeHtml(message), "</span>",
      state.checkpoints_health.ok() || !state.health.ok()
          ? ""
          : absl::StrCat("<span class=\"state bad\">checkpoints: ",
                         EscapeHtml(std::string(state.checkpoints_health.message())), "</span>"),
      "<span class=\"soft\">", EscapeHtml(ServerVersion()), " &middot; ", EscapeHtml(state.device),
      " &middot; incarnation ", state.incarnation, " &middot; up ",
      Time(state.now - state.start_time), " &middot; ",
      absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", state.now, absl::UTCTimeZone()),
      "</span></header>\n");
}

std::string Cards(const ServerState& state) {
  const ServerState::Memory& memory = state.memory;
  const RpcLimits& limits = state.limits;
  const RpcUsage& usage = state.usage;
  return absl::StrCat(
      "<div class=\"cards\">",
      Card("Memory promised to models",
           absl::StrCat(Bytes(memory.reserved_bytes), " <span class=\"soft\">of ",
                        Bytes(memory.budget_bytes), "</span>"),
           absl::StrCat(Meter(memory.reserved_bytes, memory.budget_bytes), "<span class=\"soft\">",
                        Bytes(memory.device_use.block_bytes), " in use; streams up to ",
                        Bytes(memory.formula.stream_bytes), "</span>")),
      UsageCard("Models", static_cast<int64_t>(state.models.size()), state.max_models),
      UsageCard("Push streams", usage.push_streams, limits.max_push_streams),
      UsageCard("Pull streams", usage.pull_streams, limits.max_pull_streams),
      UsageCard("Watches", usage.watch_streams, limits.max_watch_streams),
      UsageCard("Connections", usage.connections, limits.max_connections), "</div>\n");
}

std::string Pushers(const ModelOverview& overview) {
  if (!overview.run.has_value()) return "nobody has opened a run";
  const ModelOverview::Run& run = *overview.run;
  std::string text = absl::StrCat("run epoch ", run.epoch, ", ", run.world_size,
                                  run.world_size == 1 ? " rank" : " ranks");
  if (!run.is_ready) {
    absl::StrAppend(&text, ", <span class=\"wait\">not yet joined: ",
                    absl::StrJoin(run.missing_ranks, ", "), "</span>");
  }
  if (overview.session.has_value()) {
    const ModelOverview::Session& session = *overview.session;
    absl::StrAppend(&text, "; pushing step ", session.step, " for ", Time(session.age),
                    ", not yet committed: ranks ", absl::StrJoin(session.missing_ranks, ", "));
  }
  return text;
}

std::string Tracks(const ModelOverview& overview) {
  std::string text =
      "<div class=\"scroll\"><table><tr><th>Track</th><th>Schedule</th><th class=\"n\">Last "
      "weight</th><th class=\"n\">Norm</th><th class=\"n\">Distance</th></tr>";
  for (const ModelOverview::Track& track : overview.tracks) {
    const bool is_known = track.statistics.has_value();
    absl::StrAppend(
        &text, "<tr><td>", EscapeHtml(track.name), "</td><td class=\"text\">",
        EscapeHtml(track.config), track.is_paused ? " <span class=\"wait\">paused</span>" : "",
        "</td><td class=\"n\">", track.update_weight > 0 ? Number(track.update_weight) : "",
        "</td><td class=\"n\">", is_known ? Number(track.statistics->norm) : "",
        "</td><td class=\"n\">",
        is_known && track.statistics->distance.has_value() ? Number(*track.statistics->distance)
                                                           : "",
        "</td></tr>");
  }
  return text + "</table></div>";
}

std::string ModelSection(const ServerState& state, const ServerState::Model& model) {
  const ModelOverview& overview = model.overview;
  const bool has_version = overview.version.version > 0;
  const int64_t lag = std::max<int64_t>(overview.begun_step - overview.step, 0);
  std::string text = absl::StrCat(
      "<section><h2>", EscapeHtml(model.name), "</h2><dl class=\"facts\">",
      Fact("applied", has_version ? absl::StrCat("step ", overview.step, ", version ",
                                                 overview.version.version)
                                  : "nothing yet"),
      has_version ? Fact("committed", Time(state.now - overview.commit_time) + " ago") : "",
      state.has_data_dir ? Fact("durable", overview.durable_version.version > 0
                                               ? absl::StrCat("step ", overview.durable_step)
                                               : "<span class=\"wait\">nothing yet</span>")
                         : "",
      Fact("lag", absl::StrCat(lag, lag == 1 ? " step" : " steps")),
      Fact("memory", Bytes(overview.reserved_bytes)), Fact("pushes", Pushers(overview)), "</dl>",
      Tracks(overview));
  const std::string plot = DistancePlot(model.history);
  if (!plot.empty()) {
    text += plot;
  } else if (state.statistics_every_commits == 0) {
    text +=
        "<p class=\"soft\">No distances: start the server with --statistics-every-commits N, or "
        "ask with <code>emactl statistics</code>, to plot them. A copy track has the raw "
        "weights.</p>";
  } else {
    text +=
        "<p class=\"soft\">No distances yet: they need a copy track, which has the raw weights, "
        "and a commit.</p>";
  }
  return text + "</section>\n";
}

std::string ProblemList(const std::vector<Metrics::Problem>& problems, absl::Time now) {
  if (problems.empty()) {
    return "<section><h2>Last errors</h2><p class=\"soft\">None since the start.</p></section>\n";
  }
  std::string text =
      "<section><h2>Last errors</h2><div class=\"scroll\"><table><tr><th "
      "class=\"n\">Ago</th><th>What</th><th class=\"n\">Times</th><th>Error</th></tr>";
  for (const Metrics::Problem& problem : problems) {
    absl::StrAppend(&text, "<tr><td class=\"n\">", Time(now - problem.time), "</td><td>",
                    EscapeHtml(problem.what), "</td><td class=\"n\">", problem.count,
                    "</td><td class=\"text\">", EscapeHtml(problem.text), "</td></tr>");
  }
  return text + "</table></div></section>\n";
}

}  // namespace

std::string EscapeHtml(std::string_view text) {
  std::string escaped;
  escaped.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string StatusPage(const ServerState& state, const std::vector<Metrics::Problem>& problems) {
  std::string page = absl::StrCat(kHead, Header(state), Cards(state));
  for (const ServerState::Model& model : state.models) page += ModelSection(state, model);
  if (state.models.empty()) page += "<section class=\"soft\">There are no models.</section>\n";
  absl::StrAppend(&page, ProblemList(problems, state.now),
                  "<footer><a href=\"/metrics\">metrics</a><a href=\"/readyz\">readyz</a><a "
                  "href=\"/livez\">livez</a>This page loads itself again every 5 s.</footer>"
                  "</body></html>\n");
  return page;
}

}  // namespace ema
