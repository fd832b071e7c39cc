/* Shows snapshots of the cluster as they come (docs/page.md). Not here: what they say (page/snapshot.py).
   Invariants: text of the server only ever becomes text, never markup; nothing is loaded from anywhere else. */
"use strict";

const $ = (id) => document.getElementById(id);
const STALE_MS = 4000, RETRY_MS = 3000;
const TONES = { dead: "stop", quarantined: "stop", suspect: "wait", starting: "wait", warming: "wait", draining: "wait" };
const SAYS = {
  ready: "idle", busy: "at work", starting: "starting", warming: "warming up", draining: "out of service",
  suspect: "no sign of life", dead: "dead, restarting", quarantined: "quarantined",
};

/* --- values as people read them --- */
const units = (value, names, step, unit) => {
  let at = 0;
  while (value >= step && at < names.length - 1) { value /= step; at += 1; }
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${names[at]}${unit}`.trim();
};
const bytes = (value) => units(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024, "");
const perSecond = (value) => units(value, ["B", "kB", "MB", "GB", "TB"], 1000, "/s");
const count = (value) => value < 10000 ? value.toLocaleString("en") : units(value, ["", "k", "M", "G"], 1000, "");
const pace = (value) => value === 0 ? "0" : value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
const percent = (value) => `${Math.round(100 * value)} %`;
const time = (s) => s === null || s === undefined ? "–" : s < 1 ? `${Math.round(1000 * s)} ms` : s < 60 ? `${s.toFixed(1)} s` : ago(s);
const ago = (s) => s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min` : s < 172800 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;

/* --- small parts --- */
const el = (tag, cls, ...parts) => {
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  made.append(...parts);
  return made;
};
const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const track = (label, ...parts) => { // parts: shares of the whole, 0 to 1
  const bar = el("div", "track");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", label);
  ["one", "two", "three"].slice(0, parts.length).forEach((cls, k) => {
    const part = el("i", cls);
    part.style.setProperty("--part", `${(100 * Math.max(0, Math.min(1, parts[k]))).toFixed(1)}%`);
    bar.append(part);
  });
  return bar;
};
const bar = (title, told, ...parts) => {
  const row = el("div", "");
  row.append(el("div", "line", el("span", "", title), el("span", "", told)), track(`${title}: ${told}`, ...parts));
  return row;
};
const fact = (name, value) => el("div", "", el("dt", "", name), el("dd", "", value));
const who = (work) => work.session || (work.tenant && work.tenant !== "anyone" ? work.tenant : "no session");

/* --- one lane --- */
const cards = new Map();
function card(name) {
  let known = cards.get(name);
  if (!known) {
    const root = $("lane").content.firstElementChild.cloneNode(true);
    known = { root, at: {} };
    for (const node of root.querySelectorAll("[data-at]")) known.at[node.dataset.at] = node;
    say(known.at.name, name);
    root.id = `lane-${name}`;
    $("lanes").append(root);
    cards.set(name, known);
  }
  return known;
}

function showLane(lane) {
  const { root, at } = card(lane.name);
  root.dataset.state = lane.state;
  root.dataset.tone = TONES[lane.state] || "";
  say(at.state, SAYS[lane.state] ?? lane.state);
  const since = `${ago(lane.state_s)}`;
  say(at.where, [lane.device, lane.pid ? `pid ${lane.pid}` : "", TONES[lane.state] ? `for ${since}` : ""].filter(Boolean).join(" · "));
  say(at.rate, TONES[lane.state] === "stop" ? "–" : pace(lane.tokens_per_s));
  say(at.first, time(lane.first_token_s));
  say(at.reading, lane.prompt_tokens_per_s ? `${pace(lane.prompt_tokens_per_s)} tokens/s` : "–");
  say(at.step, lane.steps.decode ? time(lane.steps.decode.p99_s) : "–");
  say(at.restarts, String(lane.restarts));
  showCurve(at, lane.tokens_per_s_curve);
  at.work.replaceChildren(...(lane.work.length ? lane.work.map(showWork) : [el("li", "empty", TONES[lane.state] ? "takes no work now" : "waits for work")]));
  showBars(at.bars, lane);
}

function showWork(work) {
  const reads = work.phase === "reading";
  const does = reads ? `reads ${count(work.prompt_tokens)} tokens` : `${count(work.tokens)} of ${count(work.max_tokens)} at most`;
  const item = el("li", "", el("div", "line", el("span", "who", who(work)), el("span", "does", `${does} · ${ago(work.age_s)}`)));
  item.append(track(`${who(work)}: ${does}`, reads ? 0 : work.tokens / work.max_tokens));
  if (work.lanes_lost) item.append(el("div", "quiet", work.lanes_lost > 1 ? `went on after ${work.lanes_lost} lanes were lost` : "went on after its lane was lost"));
  return item;
}

function showCurve(at, curve) {
  const most = Math.max(1, ...curve), n = 60, from = n - curve.length;
  const points = curve.map((value, k) => `${((from + k) * 240 / (n - 1)).toFixed(1)} ${(46 - 42 * value / most).toFixed(1)}`);
  at.stroke.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  at.area.setAttribute("d", points.length > 1 ? `M${points[0].split(" ")[0]} 48L${points.join("L")}L240 48Z` : "");
  at.curve.setAttribute("aria-label", `tokens per second over the last minute, ${pace(most)} at most`);
}

function showBars(node, lane) {
  const { expert_share: experts, ngram_share: ngrams, draft_share: drafts, prompt_share: prompts, cache, conversations: kept, bytes_per_s: rates } = lane;
  const rows = [];
  if (experts.cache + experts.region) rows.push(bar("Experts", `${percent(experts.cache)} own cache · ${percent(experts.region)} shared region`, experts.cache, experts.region));
  if (ngrams.cache + ngrams.ahead + ngrams.disk) rows.push(bar("N-gram rows", `${percent(ngrams.cache)} cache · ${percent(ngrams.ahead)} read ahead · ${percent(ngrams.disk)} waited for disk`, ngrams.cache, ngrams.ahead, ngrams.disk));
  if (prompts.reused + prompts.read) rows.push(bar("Prompts", `${percent(prompts.reused)} known · ${percent(prompts.read)} read`, prompts.reused, prompts.read));
  if (drafts.right + drafts.wrong) rows.push(bar("Drafts", `${percent(drafts.right)} right`, drafts.right, drafts.wrong));
  if (cache.budget_bytes) rows.push(bar("Expert cache", `${bytes(cache.used_bytes)} of ${bytes(cache.budget_bytes)}`, cache.used_bytes / cache.budget_bytes));
  if (kept.budget_bytes) rows.push(bar("Conversations", `${kept.resident} · ${bytes(kept.used_bytes)} of ${bytes(kept.budget_bytes)}`, kept.used_bytes / kept.budget_bytes));
  if (rates.cache + rates.region + rates.disk) {
    const most = rates.cache + rates.region + rates.disk;
    rows.push(bar("Read", `${perSecond(rates.cache)} cache · ${perSecond(rates.region)} region · ${perSecond(rates.disk)} disk`, rates.cache / most, rates.region / most, rates.disk / most));
  }
  if (cache.layers.length) rows.push(cacheMap(cache.layers));
  node.hidden = !rows.length;
  node.replaceChildren(...rows);
}

const SVG = "http://www.w3.org/2000/svg";
function cacheMap(layers) { // a cell a layer: the fuller, the more of its experts are in the lane's own cache
  const told = `${percent(Math.min(...layers))} to ${percent(Math.max(...layers))} of a layer's experts`;
  const row = el("div", "", el("div", "line", el("span", "", "Cache map"), el("span", "", told)));
  const map = document.createElementNS(SVG, "svg");
  map.setAttribute("class", "map");
  map.setAttribute("viewBox", `0 0 ${layers.length} 1`);
  map.setAttribute("preserveAspectRatio", "none");
  map.setAttribute("role", "img");
  map.setAttribute("aria-label", `Cache map: ${told}`);
  layers.forEach((share, layer) => {
    const cell = document.createElementNS(SVG, "rect"), title = document.createElementNS(SVG, "title");
    for (const [name, value] of [["x", layer + 0.05], ["width", 0.9], ["height", 1], ["fill-opacity", 0.08 + 0.92 * share]]) cell.setAttribute(name, value);
    title.textContent = `layer ${layer}: ${percent(share)}`;
    cell.append(title);
    map.append(cell);
  });
  row.append(map);
  return row;
}

/* --- the rest --- */
function regionText(region) {
  const filled = region.state !== "ready" && region.bytes ? ` ${percent(region.filled_bytes / region.bytes)}` : "";
  return `region${region.host ? ` of ${region.host}` : ""} ${region.state}${filled}${region.bytes ? `, ${bytes(region.bytes)}` : ""}`;
}

function showTotals(now) {
  const { totals, model } = now;
  say($("t-rate"), pace(totals.tokens_per_s));
  say($("t-read"), pace(totals.prompt_tokens_per_s));
  say($("t-first"), time(totals.first_token_s));
  say($("t-running"), String(totals.running));
  say($("t-waiting"), String(totals.waiting));
  say($("t-lanes"), `${totals.lanes_serving} of ${totals.lanes}`);
  say($("model"), model ? `${model.name} · ${model.expert_format} · ${count(model.context_tokens)} tokens of context` : "no model yet");
  const regions = now.regions.length ? now.regions : [{ host: "", ...now.region }];
  say($("foot"), `version ${now.server} · up ${ago(now.up_s)} · ${regions.map(regionText).join(" · ")} · ${count(totals.answers)} answers, ${count(totals.cancelled)} cancelled`);
  const down = now.lanes.filter((lane) => TONES[lane.state] === "stop").map((lane) => lane.name);
  const alarm = down.length ? `${down.join(", ")} ${down.length > 1 ? "are" : "is"} down.` : "";
  $("alarm").hidden = !alarm;
  say($("alarm"), alarm);
  document.title = `${down.length ? "⚠ " : ""}${pace(totals.tokens_per_s)} tokens/s · Expressway`;
}

function showQueue(queue) {
  say($("queue-note"), `${queue.waiting} of ${queue.limit} places`);
  $("queue").hidden = !queue.groups.length;
  $("queue-none").hidden = queue.groups.length > 0;
  const rows = queue.groups.map((group) => el("tr", "", el("td", "", group.tenant), el("td", "", group.session || "–"),
    el("td", "n", String(group.requests)), el("td", "n", count(group.prompt_tokens)), el("td", "n", ago(group.longest_s))));
  if (queue.more) rows.push(el("tr", "", el("td", "", `and ${queue.more} more`)));
  $("queue-rows").replaceChildren(...rows);
}

function showKept(kept) {
  $("kept").replaceChildren(fact("in lanes' memory", count(kept.resident)), fact("checkpoints made", count(kept.checkpoints)),
    fact("parked on the host", count(kept.parks)), fact("bytes parked", bytes(kept.park_bytes)),
    fact("taken back", count(kept.restores)), fact("not usable", count(kept.refused)),
    fact("tokens not read again", count(kept.reused_tokens)));
}

function showTalks(talks) {
  $("talks").hidden = !talks.length;
  $("talk-rows").replaceChildren(...talks.map((talk) => {
    const places = Object.entries(talk.lane_tokens).map(([lane, tokens]) => `${lane} ${percent(tokens / talk.prompt_tokens)}`);
    if (talk.parked_tokens) places.push(`parked ${percent(talk.parked_tokens / talk.prompt_tokens)}`);
    return el("tr", "", el("td", "", who(talk)), el("td", "", places.join(" · ") || "nothing"),
      el("td", "n", count(talk.prompt_tokens)), el("td", "n", `${ago(talk.asked_s)} ago`));
  }));
}

function showErrors(errors, { failed, refused }) {
  const parts = [[failed, "failed"], [refused, "refused"]].filter(([n]) => n).map(([n, word]) => `${count(n)} ${word}`);
  say($("errors-note"), parts.length ? `${parts.join(", ")} since the start` : "");
  $("errors-none").hidden = parts.length > 0;
  $("error-counts").replaceChildren(...Object.entries(errors.counts).map(([code, n]) => el("li", "", `${code} ${count(n)}`)));
  $("errors").replaceChildren(...errors.latest.map((each) => el("li", "", el("time", "", `${ago(each.ago_s)} ago`),
    el("span", "", el("b", "", each.code), ` ${[each.lane, each.session, each.tokens ? `after ${count(each.tokens)} tokens` : ""].filter(Boolean).join(" · ")}`))));
}

function showChanges(changes) {
  $("changes").replaceChildren(...changes.map((change) => {
    const tone = TONES[change.after] || "go";
    return el("li", "", el("time", "", `${ago(change.ago_s)} ago`), el("span", "", el("b", "", change.lane), " ",
      el("span", tone, change.after), change.before ? ` (was ${change.before})` : ""));
  }));
}

function show(now) {
  showTotals(now);
  for (const lane of now.lanes) showLane(lane);
  for (const [name, known] of cards) {
    if (!now.lanes.some((lane) => lane.name === name)) { known.root.remove(); cards.delete(name); }
  }
  $("no-lanes").hidden = now.lanes.length > 0;
  showQueue(now.queue);
  showKept(now.parked);
  showTalks(now.conversations);
  showErrors(now.errors, now.totals);
  showChanges(now.changes);
}

/* --- the stream --- */
let heardAt = 0;
function link(state, text) { $("link").dataset.state = state; say($("link-text"), text); document.body.classList.toggle("stale", state === "lost"); }
function connect() {
  const stream = new EventSource("/events");
  stream.onmessage = (event) => { heardAt = Date.now(); link("live", "live"); show(JSON.parse(event.data)); };
  stream.onerror = () => {
    link("lost", "connection lost, trying again");
    if (stream.readyState === EventSource.CLOSED) { stream.close(); setTimeout(connect, RETRY_MS); }
  };
}
setInterval(() => { if (heardAt && Date.now() - heardAt > STALE_MS) link("lost", `no news for ${ago((Date.now() - heardAt) / 1000)}`); }, 1000);
connect();
