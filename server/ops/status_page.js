// SPDX-License-Identifier: Apache-2.0
//
// Reads status.json every few seconds and shows it. Names and messages in it may come from clients:
// they enter the page only as text, through append() and textContent.
"use strict";

const REFRESH_MS = 5000;
const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className !== "") made.className = className;
  made.append(...children);
  return made;
}

function svgElement(tag, attributes, ...children) {
  const made = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit + 1 < units.length) {
    count /= 1024;
    ++unit;
  }
  return `${count.toFixed(unit === 0 || count >= 100 ? 0 : 1)} ${units[unit]}`;
}

function duration(seconds) {
  seconds = Math.max(0, Math.floor(seconds));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 2 * 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 2 * 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} days`;
}

// JSON has null for numbers that are unknown, infinite or NaN.
function number(value) {
  return value === null ? "" : String(Number(value.toPrecision(4)));
}

function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function header(status) {
  const state = status.is_serving ? ["good", "serving"] : ["bad", `not serving: ${status.problem}`];
  const made = element("header", "", element("h1", "", "EMA Server"),
                       element("span", `state ${state[0]}`, state[1]));
  if (status.checkpoints_problem !== "" && status.is_serving) {
    made.append(element("span", "state bad", `checkpoints: ${status.checkpoints_problem}`));
  }
  const facts = [
    status.version, status.device, `incarnation ${status.incarnation}`,
    `up ${duration(status.time - status.start_time)}`,
    new Date(status.time * 1000).toISOString().replace("T", " ").replace(/\..*/, " UTC"),
  ];
  made.append(element("span", "soft", facts.join(" · ")));
  return made;
}

function meter(used, limit) {
  const bar = element("i", "");
  bar.style.width = `${100 * Math.min(1, limit > 0 ? used / limit : 0)}%`;
  return element("div", "meter", bar);
}

function card(name, {used, limit}, format, ...below) {
  return element("div", "card", element("span", "soft", name),
                 element("b", "", format(used), element("span", "soft", ` of ${format(limit)}`)),
                 meter(used, limit), ...below);
}

function cards(status) {
  const memory = element("span", "soft", `${bytes(status.memory.in_use_bytes)} in use; streams up to ${
                                             bytes(status.memory.stream_bytes)}`);
  const made = element("div", "cards", card("Memory reserved for models", status.memory, bytes, memory));
  const names = {
    models: "Models",
    push_streams: "Push streams",
    pull_streams: "Pull streams",
    watch_streams: "Watches",
    connections: "Connections",
  };
  for (const [key, name] of Object.entries(names)) made.append(card(name, status.usage[key], String));
  return made;
}

function fact(name, ...value) {
  return element("div", "", element("dt", "", name), element("dd", "", ...value));
}

function pushers(model) {
  if (model.run === null) return ["no run is open"];
  const parts = [`run epoch ${model.run.epoch}, ${plural(model.run.world_size, "rank")}`];
  if (!model.run.is_ready) {
    parts.push(element("span", "wait", `, not yet joined: ${model.run.missing_ranks.join(", ")}`));
  }
  if (model.session !== null) {
    parts.push(`; pushing step ${model.session.step} for ${
        duration(model.session.age_seconds)}, not yet committed: ranks ${
        model.session.missing_ranks.join(", ")}`);
  }
  return parts;
}

function table(columns, rows) {
  const made = element("table", "");
  made.append(element("tr", "", ...columns.map(([name, style]) => element("th", style, name))));
  for (const row of rows) {
    made.append(element("tr", "", ...row.map((cell, i) => element("td", columns[i][1], ...[cell].flat()))));
  }
  return element("div", "scroll", made);
}

function trackTable(tracks) {
  const columns = [["Track", ""], ["Schedule", "text"], ["Last weight", "n"], ["Norm", "n"], ["Distance", "n"]];
  return table(columns, tracks.map(track => [
    track.name,
    track.is_paused ? [`${track.schedule} `, element("span", "wait", "paused")] : track.schedule,
    number(track.update_weight), number(track.norm), number(track.distance),
  ]));
}

// A round number that is at least `value`.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 1.5, 2, 2.5, 3, 4, 5, 6, 8].find(factor => value <= factor * power) ?? 10) * power;
}

// The distances of up to 8 tracks over the steps; null if there are none.
function distancePlot(history) {
  const [width, height, left, right, top, bottom] = [900, 200, 56, 8, 8, 22];
  const lines = new Map();
  for (const {step, distances} of history) {
    for (const [track, distance] of Object.entries(distances)) {
      if (!lines.has(track) && lines.size < 8) lines.set(track, []);  // The page has 8 colours.
      lines.get(track)?.push([step, distance]);
    }
  }
  const points = [...lines.values()].flat();
  if (points.length === 0) return null;
  const steps = points.map(([step]) => step);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const most = roundUp(Math.max(...points.map(([, distance]) => distance ?? 0)));
  const x = step => left + (last > first ? (step - first) / (last - first) : 0.5) * (width - left - right);
  const y = distance => height - bottom - distance / most * (height - bottom - top);
  const svg = svgElement("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": "distance of each track from the raw weights, by step",
  });
  const text = (x, y, anchor, content) => svg.append(svgElement("text", {x, y, "text-anchor": anchor}, content));
  for (const share of [0, 0.5, 1]) {
    const at = y(share * most);
    svg.append(svgElement("line", {class: "grid", x1: left, x2: width - right, y1: at, y2: at}));
    text(left - 6, at + 4, "end", number(share * most));
  }
  text(left, height - 4, "start", `step ${first}`);
  if (last > first) text(width - right, height - 4, "end", String(last));
  const caption = element("figcaption", "", "Distance from the raw weights: ");
  [...lines.keys()].sort().forEach((track, color) => {
    const finite = lines.get(track).filter(([, distance]) => distance !== null);
    const corners = finite.map(([step, distance]) => `${x(step).toFixed(1)},${y(distance).toFixed(1)}`);
    svg.append(svgElement("polyline", {class: `t${color}`, points: corners.join(" ")}));
    if (finite.length === 1) {
      const [cx, cy] = corners[0].split(",");
      svg.append(svgElement("circle", {class: `t${color}`, cx, cy, r: 2}));
    }
    caption.append(element("span", `key t${color}`, track));
  });
  return element("figure", "", svg, caption);
}

function modelSection(status, model) {
  const facts = element("dl", "facts");
  const applied = model.version > 0 ? `step ${model.step}, version ${model.version}` : "nothing yet";
  facts.append(fact("applied", applied));
  if (model.version > 0) facts.append(fact("committed", `${duration(status.time - model.commit_time)} ago`));
  if (status.has_data_dir) {
    facts.append(fact("durable", model.durable_step === null ? element("span", "wait", "nothing yet")
                                                             : `step ${model.durable_step}`));
  }
  facts.append(fact("lag", plural(model.lag_steps, "step")), fact("memory", bytes(model.reserved_bytes)),
               fact("pushes", ...pushers(model)));
  const hint = status.statistics_every_commits === 0
      ? "No distances: to plot them, start the server with --statistics-every-commits N, or run emactl " +
          "statistics. They need a copy track, which has the raw weights."
      : "No distances yet: they need a copy track, which has the raw weights, and a commit.";
  return element("section", "", element("h2", "", model.name), facts, trackTable(model.tracks),
                 distancePlot(model.history) ?? element("p", "soft", hint));
}

function groupSection(status) {
  const group = status.group;
  const made = element("section", "", element("h2", "", `Group ${group.name}`));
  const registry = group.registry_problem === ""
      ? element("span", "good", "answers")
      : element("span", "bad", `unusable for ${duration(group.registry_seconds)}: ${group.registry_problem}`);
  made.append(element("dl", "facts", fact("this server", group.member), fact("registry", registry)));
  for (const problem of group.problems) made.append(element("p", "bad", problem));
  if (group.last_incident !== "") {
    const ago = duration(status.time - group.last_incident_time);
    made.append(element("p", "soft", `Last incident, ${ago} ago: ${group.last_incident}`));
  }
  const members = [["Server", ""], ["Address", ""], ["Device", ""], ["Memory", "n"], ["State", ""]];
  made.append(table(members, group.members.map(member => member.missing_seconds === null
      ? [member.name, member.address, member.device, bytes(member.memory_budget_bytes),
         element("span", "good", "joined")]
      : [member.name, "", "", "",
         element("span", "bad", `missing for ${duration(member.missing_seconds)}`)])));
  const models = [["Model", "text"], ["State", ""], ["Home", ""], ["Newest checkpoint", "n"],
                  ["Returns to a checkpoint", "n"]];
  if (group.models.length > 0) {
    made.append(table(models, group.models.map(model => [
      model.name,
      element("span", model.state === "serving" ? "good" : "wait", model.state),
      model.home,
      model.checkpoint_step === null ? "none" : `step ${model.checkpoint_step}`,
      String(model.checkpoint_return_count),
    ])));
  }
  return made;
}

function problemSection(status) {
  const made = element("section", "", element("h2", "", "Last errors"));
  const columns = [["Ago", "n"], ["What", ""], ["Times", "n"], ["Error", "text"]];
  made.append(status.problems.length === 0 ? element("p", "soft", "None since the start.")
                                           : table(columns, status.problems.map(problem => [
    duration(status.time - problem.time), problem.what, String(problem.count), problem.text,
  ])));
  return made;
}

function show(status) {
  const models = status.models.map(model => modelSection(status, model));
  if (models.length === 0) models.push(element("section", "soft", "There are no models."));
  const group = status.group === null ? [] : [groupSection(status)];
  document.getElementById("status").replaceChildren(
      header(status), cards(status), ...group, ...models, problemSection(status));
}

async function refresh() {
  const problem = document.getElementById("problem");
  try {
    const answer = await fetch("status.json", {signal: AbortSignal.timeout(REFRESH_MS)});
    show(await answer.json());
    problem.hidden = true;
  } catch (error) {
    problem.textContent = `The server did not answer at ${new Date().toLocaleTimeString()}: ${error.message}`;
    problem.hidden = false;
  }
  setTimeout(refresh, REFRESH_MS);
}

refresh();
