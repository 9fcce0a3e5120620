// The list, the chosen trajectory, and the actions of keys, clicks and the link's hash.

const byId = (id) => document.getElementById(id);
const index = JSON.parse(byId("index").textContent);
const columns = [
  ["step", "Step", (row) => String(row.step)],
  ["why", "Why", (row) => ({ "largest gap": "gap", "at random": "random" })[row.why] || row.why],
  ["reward", "Reward", (row) => number(row.reward, { digits: 3 })],
  ["mean", "Mean", (row) => number(row.mean, { digits: 2 }), "mean |log k|"],
  ["max", "Max", (row) => number(row.max, { digits: 3 }), "max |log k|"],
  ["tokens", "Tokens", (row) => row.tokens.toLocaleString("en")],
  ["dropped", "Drop", (row) => percent(row.dropped, 2), "share of the model's tokens that take no part in the loss"],
];
const state = { chosen: -1, mode: "gap", sort: "step", down: false, shown: [], spans: [], token: null, pinned: null };

function tokensOf(n) {
  return { ...JSON.parse(byId(`trajectory-${n}`).textContent), tokens: index[n].tokens };
}

function drawList() {
  const text = byId("filter").value.trim().toLowerCase();
  const range = /^(\d+)\s*(?:[-–]\s*(\d+))?$/.exec(text);
  const why = byId("why").value;
  const fits = (row) =>
    (!why || row.why === why) &&
    (range
      ? row.step >= +range[1] && row.step <= +(range[2] ?? range[1])
      : row.key.toLowerCase().includes(text));
  const value = (n) => index[n][state.sort];
  const order = (a, b) => {
    if (value(a) === null || value(b) === null) return (value(a) === null) - (value(b) === null); // unknown: last
    return (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (state.down ? -1 : 1) || a - b;
  };
  state.shown = [...index.keys()].filter((n) => fits(index[n])).sort(order);
  byId("rows").replaceChildren(...state.shown.map(listRow));
  byId("none").hidden = state.shown.length > 0;
  byId("heads").replaceChildren(...columns.map(listHead));
  markRow();
}

function listHead([name, label, , long]) {
  const on = state.sort === name;
  const button = make("button", label + (on ? (state.down ? " ↓" : " ↑") : ""));
  button.type = "button";
  button.title = `Sort by ${long || label.toLowerCase()}`;
  button.onclick = () => {
    state.down = on ? !state.down : !["step", "why"].includes(name); // the largest numbers matter most
    state.sort = name;
    drawList();
    byId("heads").children[columns.findIndex((column) => column[0] === name)].firstChild.focus();
  };
  const head = make("th", [button]);
  head.scope = "col";
  if (on) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
  return head;
}

function listRow(n) {
  const cells = columns.map(([, , show]) => make("td", show(index[n])));
  const link = make("a", cells[0].textContent);
  link.href = hashOf(n);
  cells[0].replaceChildren(link);
  const row = make("tr", cells);
  row.dataset.n = n;
  row.title = index[n].key;
  row.onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // the browser's own: a new tab
    event.preventDefault();
    choose(n);
  };
  return row;
}

function markRow(scroll = false) {
  for (const row of byId("rows").children) {
    const on = +row.dataset.n === state.chosen;
    row.classList.toggle("chosen", on);
    row.querySelector("a").setAttribute("aria-current", on);
    if (on && scroll) {
      // Within the list only: scrollIntoView would move the page under a phone's reader as well.
      const [list, box] = [row.closest(".list"), row.getBoundingClientRect()];
      const seen = list.getBoundingClientRect();
      if (box.top < seen.top + 34) list.scrollTop -= seen.top + 34 - box.top;
      else if (box.bottom > seen.bottom) list.scrollTop += box.bottom - seen.bottom + 8;
      if (byId("rows").contains(document.activeElement)) row.querySelector("a").focus({ preventScroll: true });
    }
  }
}

function hashOf(n, at) {
  const place = new URLSearchParams({ step: index[n].step, key: index[n].key });
  if (at !== undefined) place.set("at", at);
  return `#${place}`;
}

// replaceState throws on some sandboxed pages; the page works without the link.
function setHash(hash) {
  try {
    history.replaceState(null, "", hash);
  } catch {}
}

function choose(n) {
  state.chosen = n;
  state.t = tokensOf(n);
  unpin();
  drawSummary(index[n], state.t);
  state.spans = drawResponse(state.t);
  const modes = Object.keys(MODES).filter((name) => name !== "agreement" || state.t.agreement);
  byId("switch").replaceChildren(...modes.map(modeButton));
  setMode(modes.includes(state.mode) ? state.mode : "gap");
  byId("main").scrollTop = 0;
  setHash(hashOf(n));
  markRow(true);
}

function modeButton(name) {
  const button = make("button", MODES[name].label);
  button.type = "button";
  button.dataset.mode = name;
  button.onclick = () => setMode(name);
  return button;
}

function setMode(name) {
  state.mode = name;
  for (const button of byId("switch").children) button.setAttribute("aria-pressed", button.dataset.mode === name);
  byId("legend").className = `legend by-${name}`;
  byId("legend").replaceChildren(legend(name));
  byId("how").textContent = MODES[name].how;
  colourTokens(name, state.t, state.spans);
  if (state.token !== null) state.spans[state.token].classList.add("here");
  redraw();
}

function redraw() {
  drawMap(state.mode, state.t);
  drawWindow(state.spans);
}

function drawSummary(row, t) {
  document.title = `step ${row.step}, ${row.key} – ${document.querySelector("h1").textContent}`;
  byId("heading").replaceChildren(`Step ${row.step} `, make("span", [row.key, row.why].filter(Boolean).join(" · ")));
  byId("skipped").hidden = !row.skipped;
  byId("skipped").textContent = `The whole update of step ${row.step} was skipped: ${row.skipped}`;
  const gaps = t.text.map((_, i) => Math.abs(logK(t, i)));
  const largest = gaps.reduce((best, gap, i) => (gap > (gaps[best] ?? -1) ? i : best), -1);
  const unknown = gaps.filter((gap, i) => Number.isNaN(gap) && t.generated[i] === "1").length;
  const jump = make("button", number(row.max, { digits: 4 }));
  jump.type = "button";
  jump.title = "Go to this token";
  jump.onclick = () => goTo(largest);
  const cut = row.tokens > row.shown;
  const facts = [
    ["Reward", number(row.reward)],
    ["Advantage", number(row.advantage, { sign: true })],
    ["Tokens", [row.tokens.toLocaleString("en"), make("small", cut ? ` ${row.shown.toLocaleString("en")} shown` : "")]],
    ["Not the model's", (row.shown - row.generated).toLocaleString("en")],
    ["Mean |log k|", number(row.mean)],
    ["Max |log k|", largest < 0 ? "–" : [jump]],
    ["Dropped", [percent(row.dropped), make("small", cut ? " of those shown" : "")]],
    ...(unknown ? [["Without a number", unknown.toLocaleString("en")]] : []),
  ];
  byId("summary").replaceChildren(...facts.map(([name, value]) => make("div", [make("dt", name), make("dd", value)])));
  byId("prompt").hidden = !t.prompt;
  byId("prompt").querySelector("pre").textContent = t.prompt;
  byId("prompt-size").textContent = `${t.prompt.length.toLocaleString("en")} characters`;
  const add = (what, override) => [`No ${what}: add `, make("code", override), " to the run. "];
  const missing = [
    ...(t.agreement ? [] : add("routing agreement", "stability.router_agreement=true")),
    ...(t.weight ? [] : add("correction", "stability=icepop")),
  ];
  byId("missing").hidden = !missing.length;
  byId("missing").replaceChildren(...missing);
}

function goTo(i, pin = true) {
  if (!state.spans[i]) return;
  state.spans[i].scrollIntoView({ block: "center" });
  select(i, pin);
}

function select(i, pin) {
  if (state.token !== null) state.spans[state.token].classList.remove("here");
  state.token = i;
  state.pinned = pin ? i : null;
  state.spans[i].classList.add("here");
  showTip(state.t, state.spans[i], pin);
  if (pin) setHash(hashOf(state.chosen, position(state.t, i)));
}

function unpin() {
  if (state.token !== null && state.spans[state.token]) state.spans[state.token].classList.remove("here");
  if (state.pinned !== null) setHash(hashOf(state.chosen));
  state.token = state.pinned = null;
  hideTip();
}

/** Chooses the next or previous trajectory of the list as it is sorted and filtered. */
function walk(by) {
  const at = state.shown.indexOf(state.chosen);
  const next = at < 0 ? 0 : at + by;
  if (next >= 0 && next < state.shown.length) choose(state.shown[next]);
}

function openHash() {
  const place = new URLSearchParams(location.hash.slice(1));
  const [step, key] = [place.get("step"), place.get("key")];
  const n = index.findIndex((row) => String(row.step) === step && (key === null || row.key === key));
  const at = place.has("at") ? Number(place.get("at")) : NaN;
  choose(Math.max(n, 0));
  if (n >= 0 && at >= 0) goTo(tokenAt(state.t, at));
}
